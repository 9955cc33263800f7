# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Epsilon of a run whose earlier steps the callback did not see, or saw go wrong."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from dice_tf.accounting import compute_epsilon
from dice_tf.checkpoints.private_checkpoints import build_optimizer, continue_sampling
from dice_tf.errors import OptimizerArgumentError, PlainGradientsError, SamplingError
from dice_tf.ledger import admission, provenance
from dice_tf.sampling import CyclicPoissonSampling, PoissonSampling, ShuffledEpochs
from dice_tf.training.epsilon_callback import EpsilonCallback
from dice_tf.training.optimizers import DiceSGDOptimizer
from dice_tf.training.private_step import private_train_step

N, B, DELTA = 80, 10, 1e-3
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(N, 3)).astype("float32")
Y = RANDOM.normal(size=(N, 1)).astype("float32")


def make(built=True, **arguments):
    keras.utils.set_random_seed(0)
    layers = [keras.Input((3,))] if built else []
    model = keras.Sequential([*layers, keras.layers.Dense(2), keras.layers.Dense(1)])
    arguments = {"noise_multiplier": 5.0, **arguments}
    optimizer = DiceSGDOptimizer(0.1, l2_norm_clip=1.0, expected_batch_size=B, **arguments)
    model.compile(optimizer, "mse")
    return model


def fit(model, *data, **arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(*data, verbose=0, **arguments)


def asked(model, sampling):
    callback = EpsilonCallback(sampling, DELTA)
    callback.set_model(model)
    return callback


# --- Loaded into what is not built -------------------------------------------------


def test_a_loaded_optimizer_is_asked_for_its_whole_record(tmp_path):
    trained = make(noise_seed=1)
    fit(trained, X, Y, batch_size=B, epochs=2)
    trained.save_weights(tmp_path / "run.weights.h5")
    loaded = make()
    loaded.load_weights(tmp_path / "run.weights.h5")
    assert not loaded.optimizer.built
    for ask in ("epsilon", "statement"):
        with pytest.raises(SamplingError, match="16 of 16 steps used batches"):
            getattr(asked(loaded, PoissonSampling(N, B)), ask)()
    statement = asked(loaded, ShuffledEpochs(N, B)).statement()
    assert "NOT secret" in statement


def test_steps_that_a_pass_lacks_are_loaded_as_well(tmp_path):
    sampling, trained = CyclicPoissonSampling(N, B), make()
    fit(trained, sampling.dataset(X, Y), steps_per_epoch=3, epochs=1)
    fit(trained, sampling.dataset(X, Y))
    counted = asked(trained, sampling).accounted_steps()
    assert counted == 3 + 1 + 8
    trained.save_weights(tmp_path / "run.weights.h5")
    loaded = make()
    loaded.load_weights(tmp_path / "run.weights.h5")
    assert asked(loaded, sampling).accounted_steps() == counted


def test_a_loaded_optimizer_of_a_model_without_shapes_is_refused():
    model = make(built=False)
    assert asked(model, PoissonSampling(N, B)).epsilon() == 0
    model.optimizer.load_own_variables({"0": np.asarray(7)})
    with pytest.raises(SamplingError, match="loaded with 7 steps.*not built.*on a batch"):
        asked(model, PoissonSampling(N, B)).accounted_steps()


def test_a_file_of_an_optimizer_with_other_slots_is_refused(tmp_path):
    trained = make()
    fit(trained, X, Y, batch_size=B)
    trained.save_weights(tmp_path / "run.weights.h5")
    loaded = make(momentum=0.9)
    loaded.optimizer.build(loaded.trainable_variables)
    # Keras collects what parts of a file say, and has loaded the weights by then.
    with pytest.raises(ValueError, match="in this file has 3 variables.*has 7.*momentum"):
        loaded.load_weights(tmp_path / "run.weights.h5")
    with pytest.raises(SamplingError, match="`optimizer.iterations` is 8, but 0 steps"):
        asked(loaded, ShuffledEpochs(N, B)).epsilon()


class Own(keras.Model):
    """Keras calls it built after `build`, which leaves its layer as it is."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)


@pytest.mark.parametrize("save_errors", [True, False])
@pytest.mark.parametrize("data", [(X, Y), (tf.data.Dataset.from_tensor_slices((X, Y)).batch(B),)])
def test_a_model_that_is_built_without_its_layers_trains(data, save_errors):
    model = Own()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.build((None, 3))
    optimizer = DiceSGDOptimizer(
        l2_norm_clip=1.0, noise_multiplier=5.0, expected_batch_size=B, save_errors=save_errors
    )
    model.compile(optimizer, "mse")
    sampling = ShuffledEpochs(N, B)
    assert asked(model, sampling).epsilon() == 0
    assert not continue_sampling(model, sampling)
    fit(model, *data, **({"batch_size": B} if len(data) > 1 else {}))
    assert asked(model, sampling).accounted_steps() == 8


def test_asking_does_not_fix_what_trains():
    model = make()
    model.layers[0].trainable = False
    assert asked(model, PoissonSampling(N, B)).epsilon() == 0
    model.layers[0].trainable = True
    fit(model, PoissonSampling(N, B).dataset(X, Y))
    assert int(model.optimizer.iterations) == 8


# --- Draws that were used before ---------------------------------------------------


@pytest.mark.parametrize("make_sampling", [PoissonSampling, CyclicPoissonSampling])
def test_draws_for_validation_do_not_stand_for_cached_ones(make_sampling):
    sampling, model = make_sampling(N, B), make()
    callback = EpsilonCallback(sampling, DELTA)
    batches = [(x, y, w) for x, y, w in sampling.dataset(X, Y)]
    kept = tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=sampling.dataset(X, Y).element_spec
    ).apply(tf.data.experimental.assert_cardinality(8))
    admission.mark(kept, admission.Source(sampling, [8]))
    with pytest.raises(SamplingError, match="drawn for it"):
        fit(model, kept, validation_data=sampling.dataset(X, Y), epochs=4, callbacks=[callback])
    # And for good, whoever asks later.
    for later in (callback, asked(model, sampling)):
        with pytest.raises(SamplingError, match="did not draw"):
            later.epsilon()
    honest, callback = make(), EpsilonCallback(sampling, DELTA)
    fit(honest, sampling.dataset(X, Y), validation_data=sampling.dataset(X, Y), epochs=2,
        callbacks=[callback])  # fmt: skip
    assert callback.epsilon() == compute_epsilon(honest.optimizer.mechanism, sampling, 16, DELTA)


def test_a_callback_of_another_object_spoils_nothing():
    sampling, model = PoissonSampling(N, B), make()
    of_another = EpsilonCallback(PoissonSampling(N, B), DELTA)
    with pytest.raises(SamplingError, match="the very object"):
        fit(model, sampling.dataset(X, Y), callbacks=[of_another])
    assert int(model.optimizer.iterations) == 0
    callback = EpsilonCallback(sampling, DELTA)
    fit(model, sampling.dataset(X, Y), callbacks=[callback])
    expected = compute_epsilon(model.optimizer.mechanism, sampling, 8, DELTA)
    assert callback.epsilon() == expected


@pytest.mark.parametrize("with_callback", [True, False])
def test_cached_draws_are_refused(with_callback):
    sampling = PoissonSampling(N, B)
    data = sampling.dataset(X, Y)
    callbacks = [EpsilonCallback(sampling, DELTA)] if with_callback else []
    with pytest.raises(SamplingError, match="are cached.*before they are drawn"):
        fit(make(), data.cache().prefetch(1), validation_data=data, callbacks=callbacks)
    in_order = ShuffledEpochs(N, B)
    callback = EpsilonCallback(in_order, DELTA)
    fit(make(), in_order.dataset(X, Y).cache(), callbacks=[callback])
    assert callback.accounted_steps() == 8


def test_one_sampler_may_come_twice_in_a_data_set():
    sampling, model = PoissonSampling(N, B), make()
    callback = EpsilonCallback(sampling, DELTA)
    both = sampling.dataset(X, Y).concatenate(sampling.dataset(-X, Y))
    fit(model, both, callbacks=[callback])
    fit(model, both)
    assert callback.epsilon() == compute_epsilon(model.optimizer.mechanism, sampling, 32, DELTA)


def test_public_data_may_be_zipped_with_the_batches_of_a_sampler():
    sampling, model = PoissonSampling(N, B), make()
    fit(model, sampling.dataset(X, Y))
    zipped = tf.data.Dataset.zip((sampling.dataset(X, Y), tf.data.Dataset.counter()))
    fit(model, zipped.map(lambda batch, number: batch))
    assert asked(model, sampling).epsilon() == compute_epsilon(
        model.optimizer.mechanism, sampling, 16, DELTA
    )
    with pytest.raises(SamplingError, match="batches of a Poisson sampler"):
        asked(model, ShuffledEpochs(N, B)).epsilon()


def test_several_samplers_in_one_data_set_have_no_epsilon():
    sampling, model = PoissonSampling(N, B), make()
    small = PoissonSampling(N // 2, B)
    both = small.dataset(X[: N // 2], Y[: N // 2]).concatenate(sampling.dataset(X, Y))
    fit(model, both)
    with pytest.raises(SamplingError, match="other parameters"):
        fit(model, sampling.dataset(X, Y), callbacks=[EpsilonCallback(sampling, DELTA)])


def test_an_interrupted_first_epoch_of_a_model_without_shapes_names_its_sampling():
    def interrupt(batch, logs):
        if batch == 5:
            raise KeyboardInterrupt

    model, small = make(built=False), PoissonSampling(N // 2, B)
    stop = keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)
    with pytest.raises(KeyboardInterrupt):
        fit(model, small.dataset(X[: N // 2], Y[: N // 2]).repeat(9), callbacks=[stop])
    sampling = PoissonSampling(N, B)
    with pytest.raises(SamplingError, match="other parameters"):
        asked(model, sampling).epsilon()
    assert asked(model, small).epsilon() > 0


# --- ShuffledEpochs ----------------------------------------------------------------

OTHER_EPOCHS = {
    "fewer rows": dict(x=X[:40], y=Y[:40], batch_size=B),
    "larger batches": dict(x=X, y=Y, batch_size=2 * B),
    "batches of 32": dict(x=X, y=Y),
    "cut short": dict(x=X, y=Y, batch_size=B, steps_per_epoch=4),
    "data set, larger batches": dict(x=tf.data.Dataset.from_tensor_slices((X, Y)).batch(2 * B)),
    "generator": dict(x=((X[:B], Y[:B]) for _ in range(99)), steps_per_epoch=8),
    # As many steps and rows as an epoch has, of half as many examples.
    "half of the rows, repeated": dict(
        x=tf.data.Dataset.from_tensor_slices((X[: N // 2], Y[: N // 2])).repeat(2).batch(B)
    ),
}


@pytest.mark.parametrize("name", OTHER_EPOCHS)
def test_shuffled_epochs_refuses_steps_of_other_epochs(name):
    sampling, model = ShuffledEpochs(N, B), make()
    fit(model, **OTHER_EPOCHS[name], epochs=2 if name != "generator" else 1)
    message = "epochs of another length.*in 8 steps"
    with pytest.raises(SamplingError, match=message):
        asked(model, sampling).epsilon()
    with pytest.raises(SamplingError, match=message):
        fit(model, X, Y, batch_size=B, callbacks=[EpsilonCallback(sampling, DELTA)])


class Pieces(keras.utils.PyDataset):
    def __len__(self):
        return N // B

    def __getitem__(self, index):
        rows = slice(index * B, (index + 1) * B)
        return X[rows], Y[rows]


@pytest.mark.parametrize(
    "first",
    [
        dict(x=X, y=Y, batch_size=B),
        dict(x=Pieces()),
        dict(x=tf.data.Dataset.from_tensor_slices((X, Y)).batch(B)),
        dict(x=ShuffledEpochs(N, B).dataset(X, Y)),
    ],
    ids=["arrays", "PyDataset", "data set", "sampler"],
)
def test_shuffled_epochs_takes_over_steps_of_its_own(first):
    sampling, model = ShuffledEpochs(N, B), make()
    fit(model, **first, epochs=2)
    callback = EpsilonCallback(sampling, DELTA)
    fit(model, X, Y, batch_size=B, callbacks=[callback])
    fit(model, **first)
    assert callback.epsilon() == compute_epsilon(model.optimizer.mechanism, sampling, 32, DELTA)


@pytest.mark.parametrize(
    "batches", [Pieces, lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(B)]
)
def test_passes_of_unknown_rows_that_were_cut_count_whole(batches):
    def stop(batch, logs):
        if batch == 2:
            raise KeyboardInterrupt

    sampling, model = ShuffledEpochs(N, B), make()
    interrupt = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            fit(model, batches(), callbacks=[interrupt])
    fit(model, batches())
    assert asked(model, sampling).accounted_steps() == 4 * 8


def test_epochs_of_its_own_that_were_cut_count_whole():
    sampling, model = ShuffledEpochs(N, B), make()
    fit(model, sampling.dataset(X, Y), steps_per_epoch=3, epochs=2)
    fit(model, sampling.dataset(X, Y), steps_per_epoch=5, epochs=2)
    callback = EpsilonCallback(sampling, DELTA)
    fit(model, X, Y, batch_size=B, callbacks=[callback])
    assert callback.accounted_steps() == 5 * 8


@pytest.mark.parametrize("with_callback", [True, False])
@pytest.mark.parametrize("sampled", [True, False])
def test_epochs_that_a_callback_cuts_short_count_whole(with_callback, sampled):
    class Short(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = False

    sampling, model = ShuffledEpochs(N, B), make()
    callback = EpsilonCallback(sampling, DELTA)
    data = dict(x=sampling.dataset(X, Y)) if sampled else dict(x=X, y=Y, batch_size=B)
    callbacks = [callback] if with_callback else []
    fit(model, **data, epochs=4, callbacks=[*callbacks, Short()])
    assert int(model.optimizer.iterations) == 8
    callback.set_model(model)
    assert callback.accounted_steps() == 3 * 8 + 2
    assert callback.epsilon() == compute_epsilon(model.optimizer.mechanism, sampling, 32, DELTA)


def test_epochs_that_keras_limits_are_refused():
    batches = lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(B)
    data = batches().concatenate(batches())
    try:
        keras.config.set_max_steps_per_epoch(8)
        with pytest.raises(SamplingError, match="8 steps per epoch of 16 batches"):
            fit(make(), data, callbacks=[EpsilonCallback(ShuffledEpochs(N, B), DELTA)])
    finally:
        keras.config.set_max_steps_per_epoch(None)


# --- Another optimizer -------------------------------------------------------------


def test_an_optimizer_assigned_without_compile_takes_the_steps():
    sampling, model = PoissonSampling(N, B), make()
    model.compile("sgd", "mse")
    fit(model, X, Y)
    for noise_multiplier in (5.0, 0.8):
        model.optimizer = make(noise_multiplier=noise_multiplier).optimizer
        callback = EpsilonCallback(sampling, DELTA)
        fit(model, sampling.dataset(X, Y), callbacks=[callback])
        assert int(model.optimizer.iterations) == 8
        expected = compute_epsilon(model.optimizer.mechanism, sampling, 8, DELTA)
        assert callback.epsilon() == expected > 0
    model.optimizer = keras.optimizers.SGD(0.0)
    before = model.get_weights()
    fit(model, X, Y)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("with_epsilon", [True, False])
def test_an_optimizer_exchanged_while_fit_runs_is_refused(with_epsilon):
    def exchange(epoch, logs=None):
        if epoch == 1:
            model.optimizer = make().optimizer

    sampling, model = PoissonSampling(N, B), make()
    callbacks = [keras.callbacks.LambdaCallback(on_epoch_begin=exchange)]
    if with_epsilon:
        callbacks.append(EpsilonCallback(sampling, DELTA))
    with pytest.raises(OptimizerArgumentError, match="was exchanged while it trains"):
        fit(model, sampling.dataset(X, Y), epochs=3, callbacks=callbacks)


def test_a_private_optimizer_that_does_not_train_is_refused():
    sampling, model = PoissonSampling(N, B), make()
    model.compile("sgd", "mse")
    fit(model, sampling.dataset(X, Y))

    def exchange(logs):
        model.optimizer = make().optimizer

    callbacks = [
        keras.callbacks.LambdaCallback(on_train_begin=exchange), EpsilonCallback(sampling, DELTA)
    ]  # fmt: skip
    with pytest.raises(SamplingError, match="trained on 8 batches.*made no step"):
        fit(model, sampling.dataset(X, Y), callbacks=callbacks)


def test_steps_taken_back_while_fit_runs_are_not_fresh_draws():
    sampling, model = PoissonSampling(N, B), make()
    fit(model, sampling.dataset(X, Y))
    weights = []

    def roll_back(epoch, logs):
        if epoch == 0:
            weights.extend(variable.numpy() for variable in model.optimizer.variables)
        elif epoch == 2:
            for variable, value in zip(model.optimizer.variables, weights, strict=True):
                variable.assign(value)

    callback = EpsilonCallback(sampling, DELTA)
    back = keras.callbacks.LambdaCallback(on_epoch_begin=roll_back)
    fit(model, sampling.dataset(X, Y), epochs=4, callbacks=[back, callback])
    assert callback.accounted_steps() == 8 + 2 * 8


def test_models_without_a_private_optimizer_are_refused_by_name():
    uncompiled = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with pytest.raises(PlainGradientsError, match="optimizer=NoneType"):
        private_train_step(uncompiled, (X, Y))
    uncompiled.compile("sgd", "mse")
    with pytest.raises(PlainGradientsError, match="optimizer=SGD"):
        continue_sampling(uncompiled, PoissonSampling(N, B))


def test_a_record_begun_before_the_build_is_kept():
    model = make(built=False)
    fields = provenance.join_sampling(
        provenance.read_record(model.optimizer), PoissonSampling(N, B)
    )
    provenance.write_record(model.optimizer, fields)
    model.build((None, 3))
    build_optimizer(model)
    assert provenance.read_record(model.optimizer) == fields


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
