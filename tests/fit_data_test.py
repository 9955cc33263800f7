# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`fit` looks at its data: epochs of ShuffledEpochs show no example twice; rows are not ragged."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from dice_tf.distribution import multi_worker
from dice_tf.errors import SamplingError
from dice_tf.sampling import PoissonSampling, ShuffledEpochs
from dice_tf.training.epsilon_callback import EpsilonCallback
from dice_tf.training.optimizers import DiceSGDOptimizer

N, B, DELTA = 60, 8, 1e-3
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(N, 3)).astype("float32"), RNG.normal(size=(N, 1)).astype("float32")
RAGGED = tf.RaggedTensor.from_row_lengths(np.ones(2 * N, "float32"), [1, 3] * (N // 2))


def make_model(noise_multiplier=2.0):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])
    optimizer = DiceSGDOptimizer(
        1.0, l2_norm_clip=1.0, error_norm_clip=0.0, noise_multiplier=noise_multiplier,
        expected_batch_size=B,
    )  # fmt: skip
    model.compile(optimizer, "mse")
    return model


def rows(x=X, y=Y):
    return tf.data.Dataset.from_tensor_slices((x, y))


def balanced():
    return tf.data.Dataset.sample_from_datasets([rows(X[:5], Y[:5]).repeat(), rows().repeat()])


def classes(data):
    return [data.filter(lambda x, y, of=of: (x[0] > 0) == of) for of in (True, False)]


def with_positives_twice():
    positive, negative = classes(rows())
    return positive.concatenate(negative).shuffle(N).concatenate(positive.map(lambda x, y: (-x, y)))


def warmed_up():
    data = rows().shuffle(N, reshuffle_each_iteration=False)
    return data.take(20).concatenate(data)


def joined_with_itself():
    data = rows()
    return tf.data.Dataset.choose_from_datasets([data, data], tf.data.Dataset.range(2).repeat())


def two_parts():
    data = rows().batch(B)
    return data.take(3).concatenate(data.skip(3))


def first(x, y):
    return x


def second(x, y):
    return y


def split_by_class():
    positive, negative = classes(rows())
    return tf.data.Dataset.sample_from_datasets([positive, negative])


def batches_forever():
    while True:
        yield X[:B], Y[:B]


def shuffled():
    return ShuffledEpochs(N, B).dataset(X, Y)


# 60 rows are 8 batches of 8, the last one of 4.
TWICE = {
    "large batches": lambda: dict(x=rows().batch(2 * B).repeat(2)),
    "repeated first": lambda: dict(x=rows().repeat(8).batch(N)),
    "drawn from two": lambda: dict(x=balanced().batch(B).take(8)),
    "a rare class twice": lambda: dict(x=with_positives_twice().batch(12)),
    "part of it twice": lambda: dict(x=warmed_up().batch(12)),
    "joined with itself": lambda: dict(x=joined_with_itself().batch(16)),
    "endless": lambda: dict(x=rows().repeat().batch(8 * B), steps_per_epoch=8),
    "endless, balanced": lambda: dict(x=balanced().batch(B), steps_per_epoch=8),
    "restarted": lambda: dict(x=rows().batch(N), steps_per_epoch=8),
    "arrays, restarted": lambda: dict(x=X, y=Y, batch_size=N, steps_per_epoch=8),
    "arrays, tiled": lambda: dict(x=np.tile(X, (2, 1)), y=np.tile(Y, (2, 1)), batch_size=16),
    "generator": lambda: dict(x=batches_forever(), steps_per_epoch=8),
    "weights replaced": lambda: dict(
        x=rows(np.tile(X, (2, 1)), np.tile(Y, (2, 1))).batch(16)
        .map(lambda x, y: (x, y, tf.ones(tf.shape(x)[0])))
    ),
    "one batch of a sampler": lambda: dict(x=shuffled().take(1).cache().repeat(8)),
    "kept order of a sampler": lambda: dict(x=shuffled().cache(), epochs=4),
}  # fmt: skip


@pytest.mark.parametrize("name", TWICE)
def test_case_15_epochs_that_show_an_example_twice_are_refused(name):
    model, sampling, made = make_model(), ShuffledEpochs(N, B), []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: made.append(step))
    message = (
        "more rows than|Nobody can tell|drawn for it|more than once in an epoch|stands between"
    )
    with pytest.raises(SamplingError, match=message), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        budget = EpsilonCallback(sampling, DELTA)
        model.fit(**TWICE[name](), verbose=0, callbacks=[budget, count])
    # At the latest at the first batch of a second pass, or when what was prefetched is used up.
    assert len(made) <= (12 if "order" in name else 8 - 1)


ONCE = {
    "batches": lambda: dict(x=rows().batch(B)),
    "batches of other sizes": lambda: dict(
        x=rows(X[:40], Y[:40]).batch(10).concatenate(rows(X[40:], Y[40:]).batch(5))
    ),
    "two parts": lambda: dict(x=rows().take(40).batch(8).concatenate(rows().skip(40).batch(8))),
    "two parts of one": lambda: dict(x=two_parts()),
    "two classes": lambda: dict(
        x=split_by_class().batch(B).apply(tf.data.experimental.assert_cardinality(8))
    ),
    "pairs": lambda: dict(x=tf.data.Dataset.zip(rows().map(first), rows().map(second)).batch(B)),
    "no row": lambda: dict(x=rows().batch(B).map(lambda x, y: (x, y, tf.zeros(tf.shape(x)[0])))),
    "stated length": lambda: dict(x=rows().batch(B), steps_per_epoch=8),
    "arrays": lambda: dict(x=X, y=Y, batch_size=B),
    "part of arrays": lambda: dict(
        x=np.tile(X, (2, 1)), y=np.tile(Y, (2, 1)), batch_size=B, validation_split=0.5
    ),
    "sampler": lambda: dict(x=shuffled()),
    "sampler without weights": lambda: dict(x=shuffled().map(lambda x, y, w: (x, y))),
}


@pytest.mark.parametrize("name", ONCE)
def test_epochs_of_as_many_rows_as_examples_are_trained_on(name):
    model, callback = make_model(), EpsilonCallback(ShuffledEpochs(N, B), DELTA)
    model.fit(**{"epochs": 2, **ONCE[name]()}, verbose=0, callbacks=[callback])
    assert int(model.optimizer.iterations) == 16


def test_padding_for_replicas_that_lost_its_weight_is_refused(monkeypatch):
    monkeypatch.setattr(multi_worker, "join_workers", lambda sampling: 16)
    sampling = ShuffledEpochs(N, B)
    data = sampling.dataset(X, Y)
    callbacks = [EpsilonCallback(sampling, DELTA)]
    make_model().fit(data, verbose=0, callbacks=callbacks)
    for change in (lambda x, y, w: (x, y), lambda x, y, w: (x, y, tf.ones_like(w))):
        for given in (callbacks, keras.callbacks.CallbackList([callbacks]), None):
            with pytest.raises(SamplingError, match="keep the weights"):
                make_model().fit(data.map(change), verbose=0, callbacks=given)


@pytest.mark.parametrize("kind", [PoissonSampling, ShuffledEpochs])
def test_a_loop_that_drops_the_weights_still_clips_every_example(kind):
    # Only example 0 has a gradient; the sum of a step without noise is its influence.
    x, y = np.zeros((N, 3), "float32"), np.full((N, 1), 100.0, "float32")
    x[0, 0] = 1.0
    with pytest.warns(UserWarning, match="not private"):
        model = make_model(noise_multiplier=0.0)
    influences = []
    for batch_x, batch_y, _ in kind(N, B).dataset(x, y, planned_epochs=30).repeat(30):
        model.layers[0].kernel.assign(np.zeros((3, 1)))
        model.train_on_batch(batch_x, batch_y)
        influences.append(B * float(np.linalg.norm(model.layers[0].kernel)))
    assert 1 - 2e-5 <= max(influences) <= 1.0 and min(influences) == 0.0


@pytest.mark.parametrize(
    "data",
    [
        lambda: (RAGGED, Y),
        lambda: ({"a": RAGGED}, Y),
        lambda: (rows(RAGGED, Y).batch(B), None),
        lambda: (PoissonSampling(N, B).dataset(RAGGED, Y), None),
    ],
)
def test_ragged_rows_are_refused_with_what_to_do(data):
    x, y = data()
    with pytest.raises(SamplingError, match="Ragged rows.*to_tensor.*mask_zero"):
        make_model().fit(x, y, verbose=0)


def test_batches_of_another_size_than_the_optimizer_expects_warn():
    fit = lambda *data, **arguments: make_model().fit(*data, verbose=0, **arguments)
    with pytest.warns(UserWarning, match="batches of 32 .*expected_batch_size=8") as caught:
        fit(X, Y)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="batches of 5 examples"):
        fit(X, Y, validation_split=0.9, batch_size=B)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="`fit` trains on batches")
        fit(X, Y, batch_size=B)
        fit(X[:B], Y[:B])
        fit(rows().batch(2 * B))
        fit(PoissonSampling(N, B).dataset(X, Y))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
