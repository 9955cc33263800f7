# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What `distribution_test.py` observes: trainings on 1, 2 and 4 logical CPUs.

A program of its own, because logical devices must be configured before TensorFlow starts.
It prints one line of JSON: a dictionary from scenario to what was seen.
"""

import json
import sys
import traceback
import warnings

import keras
import numpy as np
from softmax_regression import BATCH, CLASSES, FEATURES, flat, make_model
import tensorflow as tf

import dice_tf
from dice_tf.ledger import provenance

# The last of six batches has one example: uneven for 2 replicas, and 3 of 4 get nothing.
ROWS = 5 * BATCH + 1
NOISY = dict(l2_norm_clip=0.5, noise_multiplier=3.0, noise_seed=11)


def problem():
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, FEATURES)).astype("float32") * 3
    x[::3] *= 0.1
    y = random.integers(0, CLASSES, ROWS)
    # Contradicts another example, so that a residual is left at the end.
    x[-1], y[-1] = x[1], (y[1] + 1) % CLASSES
    return x, y


X, Y = problem()


def strategies():
    devices = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration()] * 4
    tf.config.set_logical_device_configuration(devices[0], logical)
    names = [f"CPU:{i}" for i in range(4)]
    # One process can hold collectives over one set of devices.
    reduction = tf.distribute.ReductionToOneDevice()
    return {
        "1": tf.distribute.get_strategy(),
        "2": tf.distribute.MirroredStrategy(names[:2]),
        "4": tf.distribute.MirroredStrategy(names, cross_device_ops=reduction),
        "mirrored_1": tf.distribute.MirroredStrategy(names[3:]),
        "one_device": tf.distribute.OneDeviceStrategy("CPU:1"),
    }


def model_under(strategy, compile_arguments=None, **arguments):
    defaults = dict(
        learning_rate=0.5,
        momentum=0.9,
        l2_norm_clip=0.5,
        error_norm_clip=0.4,
        noise_multiplier=0.0,
        expected_batch_size=BATCH,
        self_check=False,
    )
    with strategy.scope():
        optimizer = dice_tf.DiceSGDOptimizer(**{**defaults, **arguments})
        return make_model(optimizer, **(compile_arguments or {}))


def copies(variable):
    """The copies of a Keras variable, one for each replica."""
    return [copy.numpy() for copy in getattr(variable.value, "values", [variable.value])]


class CompareReplicas(keras.callbacks.Callback):
    """After every step, compares all that the next step depends on between the replicas."""

    differences, steps = 0, 0

    def on_train_batch_end(self, batch, logs=None):
        optimizer = self.model.optimizer
        state = [*self.model.trainable_variables, *optimizer.variables, *optimizer.errors]
        for variable in [*state, optimizer._private.noise_draws]:
            first, *others = copies(variable)
            self.differences += sum(not np.array_equal(first, other) for other in others)
        self.steps += 1


def two_layers_under(strategy, **arguments):
    """A model with two layers, to be clipped to thresholds of their own."""
    with strategy.scope():
        one = model_under(strategy, clipping="per_layer", **arguments)
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(CLASSES)]
        model = keras.Sequential([keras.Input((FEATURES,)), *layers])
        model.compile(one.optimizer, one.loss)
    return model


def fit(strategy, evaluate=False, make=model_under, **arguments):
    model = make(strategy, **arguments)
    initial, compare = flat(model.trainable_variables), CompareReplicas()
    history = model.fit(
        X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[compare]
    )
    seen = {
        "initial": initial.tolist(),
        "weights": flat(model.trainable_variables).tolist(),
        "errors": flat(model.optimizer.errors).tolist(),
        "iterations": int(model.optimizer.iterations.numpy()),
        "loss": history.history["loss"],
        "differences": compare.differences,
        "compared_steps": compare.steps,
    }
    if evaluate:
        seen["evaluated"] = model.evaluate(X, Y, batch_size=BATCH, verbose=0)
        seen["predicted"] = model.predict(X, batch_size=BATCH, verbose=0).ravel().tolist()
    return seen


def noise(strategy):
    """Updates of a model without any gradient, divided by the learning rate."""
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(300)])
        optimizer = dice_tf.DiceSGDOptimizer(1.0, expected_batch_size=4, **NOISY)
        model.compile(optimizer, "mse")
    compare, before = CompareReplicas(), flat(model.trainable_variables)
    data = (np.ones((4, 10), "float32"), np.ones((4, 300), "float32"), np.zeros(4, "float32"))
    updates = []
    for _ in range(2):
        model.fit(*data[:2], sample_weight=data[2], batch_size=4, verbose=0, callbacks=[compare])
        after = flat(model.trainable_variables)
        updates.append(after - before)
        before = after
    return {"updates": np.concatenate(updates).tolist(), "differences": compare.differences}


def samplings():
    return {
        "poisson": dice_tf.PoissonSampling(ROWS, BATCH, seed=5),
        "cyclic": dice_tf.CyclicPoissonSampling(ROWS, BATCH, seed=5),
        "allocation": dice_tf.RandomAllocation(ROWS, BATCH, seed=5),
        "shuffled": dice_tf.ShuffledEpochs(ROWS, BATCH, seed=5),
    }


def batches(strategy, name):
    """For every step: the rows drawn, over all replicas, and the marks."""
    with strategy.scope():
        data = samplings()[name].dataset(np.arange(ROWS), Y)
    seen = []
    for rows, _, weights in strategy.experimental_distribute_dataset(data):
        rows, weights = (
            np.concatenate(strategy.experimental_local_results(part)) for part in (rows, weights)
        )
        marks = int(provenance.count_marks(tf.constant(weights)))
        seen.append([sorted(rows[weights != 0].tolist()), marks])
    return seen


def sampled_fit(strategy, steps_per_execution, kind="cyclic"):
    compile_arguments = dict(steps_per_execution=steps_per_execution)
    model = model_under(strategy, compile_arguments, self_check=True, **NOISY)
    with strategy.scope():
        sampling = samplings()[kind]
        data = sampling.dataset(X, Y, planned_epochs=2)
    history = model.fit(
        data,
        epochs=2,
        shuffle=False,
        verbose=0,
        validation_data=(X, Y),
        callbacks=[dice_tf.EpsilonCallback(sampling, delta=1e-3)],
    )
    return {
        "weights": flat(model.trainable_variables).tolist(),
        "iterations": int(model.optimizer.iterations.numpy()),
        "history": history.history,
        "draws": sampling.draws,
    }


def owners():
    """A sampler of owners of the rows, and how their sizes vary."""
    ids = np.minimum(np.arange(ROWS) ** 2 % 23, 12)
    return dice_tf.CyclicPoissonSampling.of_owners(
        ids, expected_batch_size=4, rows_per_owner=3, seed=5
    )


def fit_on_owners(strategy, **arguments):
    """Trains on two views of rows of owners."""
    units = dict(rows_per_unit=6, expected_batch_size=4)
    model = model_under(strategy, self_check=True, **NOISY, **units, **arguments)
    compare = CompareReplicas()
    with strategy.scope():
        sampling = owners()
        data = sampling.dataset(X, Y, planned_epochs=2, views=2)
    callbacks = [dice_tf.EpsilonCallback(sampling, delta=1e-3), compare]
    history = model.fit(data, epochs=2, verbose=0, callbacks=callbacks).history
    return {
        "weights": flat(model.trainable_variables).tolist(),
        "errors": flat(model.optimizer.errors).tolist(),
        "iterations": int(model.optimizer.iterations.numpy()),
        "epsilon": history["epsilon"],
        "differences": compare.differences,
    }


def loop(strategy, ready=True, distributed=True, run=True):
    model = model_under(strategy)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    shares = strategy.experimental_distribute_dataset(data)
    if ready:
        dice_tf.check_gradients(model, next(iter(shares)))
    step = tf.function(lambda batch: strategy.run(dice_tf.private_train_step, args=(model, batch)))
    for _ in range(2):
        for batch in shares if distributed else data:
            step(batch) if run else dice_tf.private_train_step(model, batch)
    return {"weights": flat(model.trainable_variables).tolist()}


def train_on_batch(strategy):
    model_under(strategy).train_on_batch(X[:BATCH], Y[:BATCH])


def compiled_by_xla(strategy):
    model_under(strategy, dict(jit_compile=True)).fit(X, Y, batch_size=BATCH, verbose=0)


class SubtractsBatchMean(keras.layers.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, axis=0, keepdims=True)


def mixing_model(strategy):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        layers = [keras.Input((FEATURES,)), SubtractsBatchMean(), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        optimizer = dice_tf.DiceSGDOptimizer(1.0, expected_batch_size=BATCH, **NOISY)
        model.compile(optimizer, "mse")
    model.fit(X, Y.astype("float32"), batch_size=BATCH, verbose=0)


def scenarios():
    known = strategies()
    results = {"problem": {"x": X.tolist(), "y": Y.tolist()}}

    def observe(name, function, *arguments, **keywords):
        try:
            results[name] = function(*arguments, **keywords)
        except Exception as error:  # What is refused is part of what the tests look at.
            results[name] = {"error": type(error).__name__, "message": str(error)}
            if not isinstance(error, dice_tf.errors.DicePrivacyError):
                traceback.print_exc()

    unbounded = dict(bound_residuals=False)
    observe("bounded 1", fit, known["1"], evaluate=True)
    observe("bounded one_device", fit, known["one_device"])
    observe("bounded 2", fit, known["2"], evaluate=True, chunk_size=3)
    observe("bounded 4", fit, known["4"])
    observe("unbounded 2", fit, known["2"], **unbounded)
    observe("unbounded 4", fit, known["4"], **unbounded, chunk_size=1)
    observe("feedback_steps=2 2", fit, known["2"], feedback_steps=2)
    observe("per_layer 1", fit, known["1"], make=two_layers_under)
    observe("per_layer 2", fit, known["2"], make=two_layers_under, chunk_size=3)
    observe("per_layer 4", fit, known["4"], make=two_layers_under)
    for name in ("1", "2", "4"):
        for kind in samplings():
            observe(f"batches {kind} {name}", batches, known[name], kind)
    for name in ("2", "4"):
        observe(f"noise {name}", noise, known[name])
    for name, steps in (("1", 1), ("mirrored_1", 1), ("2", 1), ("2", 4)):
        observe(f"sampled {name} {steps}", sampled_fit, known[name], steps)
    for name in ("1", "2"):
        observe(f"allocated {name} 1", sampled_fit, known[name], 1, "allocation")

    for name, chunks in (("1", {}), ("2", {"chunk_size": 12})):
        observe(f"owners {name}", fit_on_owners, known[name], **chunks)

    two = known["2"]
    observe("loop", loop, two)
    observe("not ready", loop, two, ready=False)
    observe("same batch", loop, two, distributed=False)
    observe("outside", loop, two, run=False)
    observe("train_on_batch", train_on_batch, two)
    observe("jit_compile", compiled_by_xla, two)
    observe("microbatches", fit, two, num_microbatches=4)
    observe("mixing examples", mixing_model, two)
    return results


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print("RESULT " + json.dumps(scenarios()))
    sys.stdout.flush()
