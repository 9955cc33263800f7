# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""One worker process of `multi_worker_test.py`; prints what it saw as one line of JSON."""

import json
import os

import keras
import numpy as np
from softmax_regression import BATCH, flat, make_model, make_problem
import tensorflow as tf

import dice_tf

X, Y = make_problem()


def model_under(strategy, noise_multiplier=2.0, **compile_arguments):
    with strategy.scope():
        optimizer = dice_tf.DiceSGDOptimizer(
            0.5,
            momentum=0.9,
            l2_norm_clip=0.5,
            noise_multiplier=noise_multiplier,
            expected_batch_size=BATCH,
        )
        return make_model(optimizer, **compile_arguments)


def data_under(strategy, kind, **arguments):
    with strategy.scope():
        sampling = kind(len(X), BATCH, **arguments)
        return sampling, sampling.dataset(X, Y, planned_epochs=2)


def fit(strategy, steps_per_execution=1, noise_multiplier=2.0, kind=dice_tf.CyclicPoissonSampling):
    # Neither the noise nor the draws have a seed: workers must share them themselves.
    model = model_under(strategy, noise_multiplier, steps_per_execution=steps_per_execution)
    sampling, data = data_under(strategy, kind)
    history = model.fit(
        data,
        epochs=2,
        shuffle=False,
        verbose=0,
        validation_data=(X, Y),
        callbacks=[dice_tf.EpsilonCallback(sampling, delta=1e-3)],
    )
    if steps_per_execution == 1:
        model.save("model.keras")
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).save("checkpoint")
    return {
        "weights": flat(model.trainable_variables).tolist(),
        "errors": flat(model.optimizer.errors).tolist(),
        "key": model.optimizer._private.noise_key.read().numpy().tolist(),
        "iterations": int(model.optimizer.iterations.numpy()),
        "history": history.history,
        "predicted": model.predict(X, batch_size=BATCH, verbose=0).ravel().tolist(),
    }


def noiseless(strategy):
    """Steps on batches in a fixed order, to compare with one process."""
    model = model_under(strategy, noise_multiplier=0.0)
    _, data = data_under(strategy, dice_tf.ShuffledEpochs, seed=4)
    model.fit(data, epochs=2, shuffle=False, verbose=0)
    return {"weights": flat(model.trainable_variables).tolist()}


def shards(strategy, kind):
    """For every step, the rows that this worker takes."""
    with strategy.scope():
        data = kind(len(X), BATCH).dataset(np.arange(len(X)), Y)
    taken = []
    for rows, _, weights in strategy.experimental_distribute_dataset(data):
        rows, weights = (
            np.concatenate(strategy.experimental_local_results(part)) for part in (rows, weights)
        )
        taken.append(rows[weights != 0].tolist())
    return taken


def second_fit(strategy):
    """The draws of a `fit` after one that prefetched further on one worker than on the other."""
    model = model_under(strategy)
    sampling, data = data_under(strategy, dice_tf.PoissonSampling)
    fit = lambda: model.fit(data.repeat(), steps_per_epoch=3, shuffle=False, verbose=0)
    fit()
    sampling._state.iterations += strategy.cluster_resolver.task_id
    streams, generator = [], dice_tf.PoissonSampling._generator

    def recording(self, *stream):
        streams.append([int(number) for number in stream])
        return generator(self, *stream)

    dice_tf.PoissonSampling._generator = recording
    fit()
    dice_tf.PoissonSampling._generator = generator
    return streams[:3]


def other_noise(strategy):
    index = strategy.cluster_resolver.task_id
    fit(strategy, noise_multiplier=1.0 + index, kind=dice_tf.ShuffledEpochs)


def other_size(strategy):
    count = len(X) - strategy.cluster_resolver.task_id
    with strategy.scope():
        dice_tf.PoissonSampling(count, BATCH).dataset(X[:count], Y[:count])


def other_seed(strategy):
    seed = strategy.cluster_resolver.task_id
    with strategy.scope():
        dice_tf.PoissonSampling(len(X), BATCH, seed=seed).dataset(X, Y)


def other_draws(strategy):
    """As if each worker had loaded a private checkpoint of its own."""
    model = model_under(strategy)
    _, data = data_under(strategy, dice_tf.PoissonSampling)
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    sampler = model.optimizer._private.sampler
    sampler.assign(np.full(sampler.shape, strategy.cluster_resolver.task_id))
    model.fit(data, shuffle=False, verbose=0)


def backup_in_scope(strategy):
    model = model_under(strategy)
    _, data = data_under(strategy, dice_tf.PoissonSampling)
    backup = keras.callbacks.BackupAndRestore("backup")
    with strategy.scope():
        model.fit(data, shuffle=False, verbose=0, callbacks=[backup])


def arrays(strategy):
    model_under(strategy).fit(X, Y, batch_size=BATCH, verbose=0)


def loop_before_comparison(strategy):
    model = model_under(strategy)
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    strategy.run(dice_tf.private_train_step, args=(model, (X[:4], Y[:4])))


def main():
    if os.environ.get("TF_CONFIG"):
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    else:
        strategy = tf.distribute.get_strategy()
    results = {"replicas": strategy.num_replicas_in_sync}

    def observe(name, function, *arguments, **keywords):
        try:
            results[name] = function(strategy, *arguments, **keywords)
        except dice_tf.errors.DicePrivacyError as error:
            results[name] = {"error": type(error).__name__, "message": str(error)}

    observe("noiseless", noiseless)
    if strategy.num_replicas_in_sync > 1:
        for kind in (
            dice_tf.PoissonSampling,
            dice_tf.CyclicPoissonSampling,
            dice_tf.ShuffledEpochs,
        ):
            observe(f"shards {kind.__name__}", shards, kind)
        observe("noisy", fit)
        observe("noisy, several steps", fit, steps_per_execution=3)
        observe("second fit", second_fit)
        for refused in (
            other_noise,
            other_size,
            other_seed,
            other_draws,
            backup_in_scope,
            arrays,
            loop_before_comparison,
        ):
            observe(refused.__name__, refused)
    print("RESULT " + json.dumps(results), flush=True)
    os._exit(0)  # Without waiting for a cluster whose other members may be gone.


if __name__ == "__main__":
    main()
