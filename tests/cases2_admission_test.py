# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Data that an epsilon would not be true of is refused before the first step (cases A3 to A5)."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from dice_tf import accounting
from dice_tf.errors import AccountingError, SamplingError
from dice_tf.sampling import CyclicPoissonSampling, PoissonSampling, ShuffledEpochs
from dice_tf.training.epsilon_callback import EpsilonCallback
from dice_tf.training.optimizers import DiceSGDOptimizer

N, B, DELTA = 64, 8, 1e-3
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(N, 3)).astype("float32"), RNG.normal(size=(N, 1)).astype("float32")


def make_model(**arguments):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = DiceSGDOptimizer(
        0.1, l2_norm_clip=0.1, noise_multiplier=2.0, expected_batch_size=B, **arguments
    )
    model.compile(optimizer, "mse")
    return model


def iterations(model):
    return int(model.optimizer.iterations)


def asked(model, sampling):
    callback = EpsilonCallback(sampling, DELTA)
    callback.set_model(model)
    return callback


def has_target(x, y, w):
    return tf.reduce_any(x[:, 0] > 1.0)


def fails_on_target(x, y, w):
    with tf.control_dependencies([tf.debugging.assert_less(x, 1.0)]):
        return tf.identity(x), y, w


def without_the_target(data):
    return data.repeat().filter(has_target).apply(tf.data.experimental.assert_cardinality(8))


ALTERED = {
    "take": lambda d: d.take(3),
    "skip": lambda d: d.skip(1),
    "shard": lambda d: d.shard(2, 0),
    "shuffle": lambda d: d.shuffle(16),
    "filter": lambda d: d.repeat().filter(has_target),
    "filter, stated length": without_the_target,
    "ignored errors": lambda d: d.map(fails_on_target).ignore_errors(),
    "take_while": lambda d: d.take_while(has_target),
    "shard, flat_map": lambda d: d.flat_map(lambda *b: tf.data.Dataset.from_tensors(b).shard(1, 0)),
    "interleave": lambda d: d.interleave(lambda *b: tf.data.Dataset.from_tensors(b)),
    "unbatch": lambda d: d.unbatch().batch(B),
    "rebatch": lambda d: d.rebatch(B),
    "cache": lambda d: d.cache(),
    "cache after zip": lambda d: tf.data.Dataset.zip((d, tf.data.Dataset.range(8)))
    .map(lambda batch, i: batch).cache(),
    "scan": lambda d: d.scan(0.0, lambda s, b: (s + tf.reduce_sum(b[0]), (b[0] + s, *b[1:]))),
    "sample_from": lambda d: tf.data.Dataset.sample_from_datasets([d, d]),
    "other rows behind": lambda d: d.concatenate(
        tf.data.Dataset.from_tensors((X[:B], Y[:B], np.ones(B, "float32")))
        .map(lambda x, y, w: (tf.ensure_shape(x, [None, 3]), tf.ensure_shape(y, [None, 1]),
                              tf.ensure_shape(w, [None])))
    ),
    "two draws in one step": lambda d: tf.data.Dataset.zip((d, d)).map(
        lambda a, b: tuple(tf.concat(pair, 0) for pair in zip(a, b))
    ),
}  # fmt: skip


@pytest.mark.parametrize("with_callback", [True, False])
@pytest.mark.parametrize("name", ALTERED)
def test_a4_d5_altered_batches_of_a_sampler_are_refused_before_the_first_step(name, with_callback):
    sampling, model = PoissonSampling(N, B), make_model()
    data = ALTERED[name](sampling.dataset(X, Y))
    callbacks = [EpsilonCallback(sampling, DELTA)] if with_callback else []
    with pytest.raises(SamplingError):
        model.fit(data, steps_per_epoch=4, verbose=0, callbacks=callbacks)
    assert iterations(model) == 0


UNALTERED = {
    "nothing": lambda d: d,
    "map": lambda d: d.map(lambda x, y, w: (2 * x, y, w)),
    "parallel map": lambda d: d.map(lambda x, y, w: (x, y, w), num_parallel_calls=2),
    "prefetch": lambda d: d.prefetch(2),
    "repeat": lambda d: d.repeat(),
    "options": lambda d: d.with_options(tf.data.Options()),
    "enumerate": lambda d: d.enumerate().map(lambda i, batch: batch),
    "stated length": lambda d: d.apply(tf.data.experimental.assert_cardinality(8)),
    "one after the other": lambda d: d.concatenate(d),
}


@pytest.mark.parametrize("kind", [PoissonSampling, CyclicPoissonSampling])
@pytest.mark.parametrize("name", UNALTERED)
def test_a4_operations_on_each_batch_are_allowed(name, kind):
    sampling, model = kind(N, B), make_model()
    callback = EpsilonCallback(sampling, DELTA)
    data = UNALTERED[name](sampling.dataset(X, Y))
    # As the refusal of `take` has it, for fewer steps.
    model.fit(data, steps_per_epoch=4, epochs=2, verbose=0, callbacks=[callback])
    expected = accounting.compute_epsilon(model.optimizer.mechanism, sampling, 8, DELTA)
    assert callback.epsilon() == expected


class Behind(keras.utils.PyDataset):
    """Batches of a sampler, of which some may be left out."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def test_a4_a_sampler_that_is_not_seen_has_no_amplification():
    sampling = PoissonSampling(N, B)
    hidden = {
        "generator": lambda: (batch for batch in sampling.dataset(X, Y)),
        "flat_map": lambda: tf.data.Dataset.range(1).flat_map(lambda i: sampling.dataset(X, Y)),
        "PyDataset": lambda: Behind([tuple(map(np.asarray, b)) for b in sampling.dataset(X, Y)]),
        "arrays": lambda: X,
    }
    for name, data in hidden.items():
        model, callback = make_model(), EpsilonCallback(sampling, DELTA)
        arguments = dict(y=Y) if name == "arrays" else {}
        with pytest.raises(SamplingError, match="it is not seen to draw the data"):
            model.fit(data(), verbose=0, steps_per_epoch=8, callbacks=[callback], **arguments)
        assert iterations(model) == 0
        # And whoever asks later, whatever comes before or after.
        model.fit(sampling.dataset(X, Y), verbose=0)
        model.fit(
            data(), verbose=0, steps_per_epoch=None if name == "PyDataset" else 8, **arguments
        )
        model.fit(sampling.dataset(X, Y), verbose=0)
        with pytest.raises(SamplingError, match="hid what drew|did not draw"):
            asked(model, sampling).epsilon()


class AllRows(keras.utils.PyDataset):
    """Declares batches and shows all rows in each of them."""

    def __len__(self):
        return N // B

    def __getitem__(self, index):
        return X, Y


def test_a3_rows_that_an_epoch_really_showed_are_counted():
    sampling = ShuffledEpochs(N, B)
    model = make_model()
    with pytest.raises(SamplingError, match="128 rows, more rows than there are examples"):
        model.fit(AllRows(), verbose=0, callbacks=[EpsilonCallback(sampling, DELTA)])
    assert iterations(model) <= 2
    # Also in a `fit` that nobody watched.
    model = make_model()
    model.fit(AllRows(), verbose=0)
    with pytest.raises(SamplingError, match="512 rows"):
        model.fit(X, Y, batch_size=B, verbose=0, callbacks=[EpsilonCallback(sampling, DELTA)])


def test_a3_the_record_in_files_does_not_tell_how_many_rows_had_a_weight():
    records, counted = [], []
    for weights in (np.ones(N, "float32"), np.arange(N, dtype="float32") % 2):
        model = make_model()
        model.fit(X, Y, batch_size=B, sample_weight=weights, shuffle=False, verbose=0)
        optimizer = model.optimizer
        records.append(optimizer.sampling_record.numpy().tolist())
        counted.append(optimizer._private.row_counts.numpy().tolist())
        assert not any("row_counts" in variable.path for variable in optimizer.variables)
    assert records[0] == records[1] and counted == [[64, 64, 8], [32, 32, 4]]


def rows(part=slice(None)):
    return tf.data.Dataset.from_tensor_slices((X[part], Y[part]))


def oversampled():
    return tf.data.Dataset.sample_from_datasets([rows(slice(4)).repeat(), rows().repeat()])


REPEATED = {
    "oversampled": lambda: oversampled().take(N).batch(B),
    "chosen": lambda: tf.data.Dataset.choose_from_datasets(
        [rows(slice(4)).repeat(), rows()], tf.data.Dataset.range(2).repeat()
    ).take(N).batch(B),
    "repeated": lambda: rows().repeat(2).take(N).batch(B),
    "repeated, filtered": lambda: rows().repeat(8).filter(lambda x, y: x[0] > 1).batch(B)
    .apply(tf.data.experimental.assert_cardinality(8)),
    "repeated within": lambda: rows().flat_map(
        lambda x, y: tf.data.Dataset.from_tensors((x, y)).repeat(2)
    ).take(N).batch(B).apply(tf.data.experimental.assert_cardinality(8)),
    "interleaved": lambda: tf.data.Dataset.range(2).interleave(
        lambda i: rows(slice(4)).repeat()
    ).take(N).batch(B).apply(tf.data.experimental.assert_cardinality(8)),
}  # fmt: skip


@pytest.mark.parametrize("name", REPEATED)
def test_a3_resampled_data_is_not_one_pass(name):
    model, callback = make_model(), EpsilonCallback(ShuffledEpochs(N, B), DELTA)
    with pytest.raises(SamplingError, match="more than once in an epoch"):
        model.fit(REPEATED[name](), verbose=0, callbacks=[callback])
    assert iterations(model) == 0


ONCE = {
    "mixed": lambda: tf.data.Dataset.sample_from_datasets([rows(slice(20)), rows(slice(20, N))])
    .batch(B).apply(tf.data.experimental.assert_cardinality(8)),
    "interleaved": lambda: tf.data.Dataset.range(2).interleave(
        lambda i: rows().shard(2, i)
    ).batch(B).apply(tf.data.experimental.assert_cardinality(8)),
    "shuffled": lambda: rows().shuffle(N).batch(B).prefetch(1),
    "time series": lambda: keras.utils.timeseries_dataset_from_array(
        X, Y, sequence_length=1, batch_size=B
    ).map(lambda x, y: (x[:, 0], y)),
}  # fmt: skip


@pytest.mark.parametrize("name", ONCE)
def test_a3_data_that_shows_each_example_once_is_allowed(name):
    model, callback = make_model(), EpsilonCallback(ShuffledEpochs(N, B), DELTA)
    model.fit(ONCE[name](), verbose=0, epochs=2, callbacks=[callback])
    assert callback.accounted_steps() == iterations(model) == 16


@dataclasses.dataclass(frozen=True)
class OftenTheFirst(PoissonSampling):
    """Draws the first row at every step."""

    def draw_plan(self, planned_steps, replicas=1):
        begin, draw, size = super().draw_plan(planned_steps, replicas)

        def draw_first(iteration, step):
            indices, weights = draw(iteration, step)
            indices[0] = 0
            return indices, weights

        return begin, draw_first, size


def test_a5_a_sampler_of_a_derived_class_is_not_accounted_as_its_parent():
    sampling, model = OftenTheFirst(N, B), make_model()
    for ask in (
        lambda: EpsilonCallback(sampling, DELTA),
        lambda: accounting.compute_epsilon(model.optimizer.mechanism, sampling, 8, DELTA),
        lambda: model.fit(sampling.dataset(X, Y), verbose=0),
    ):
        with pytest.raises(AccountingError, match="not of a class derived from them"):
            ask()
    assert iterations(model) == 0


# --- Rows in another order (D3) ---------------------------------------------------------


class FirstErrors(keras.callbacks.Callback):
    """Notes whether there is an error to feed back when the first step of a `fit` begins."""

    async_safe = True

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 0:
            errors = self.model.optimizer.errors
            self.there = any(np.abs(error.numpy()).max() > 0 for error in errors)


OTHER_ORDER = RNG.permutation(N)
SAME_ROWS = {"arrays": lambda i: (X[i], Y[i]), "pairs": lambda i: (list(zip(X[i], Y[i])), None)}


@pytest.mark.parametrize("name", SAME_ROWS)
@pytest.mark.parametrize("with_callback", [True, False])
def test_d3_nothing_is_fed_back_to_rows_that_changed_places(name, with_callback):
    sampling, model, first = CyclicPoissonSampling(N, B), make_model(), FirstErrors()
    callback = EpsilonCallback(sampling, DELTA)
    callbacks = [callback, first] if with_callback else [first]
    as_before, changed = (SAME_ROWS[name](order) for order in (np.arange(N), OTHER_ORDER))
    for data, expected in [
        (as_before, False),
        (as_before, True),
        (changed, False),
        (changed, True),
    ]:
        model.fit(sampling.dataset(*data), verbose=0, callbacks=callbacks)
        assert first.there == expected
    expected = accounting.compute_epsilon(model.optimizer.mechanism, sampling, 32, DELTA)
    assert asked(model, sampling).epsilon() == expected


def test_d3_rows_do_not_change_places_within_a_data_set():
    sampling = CyclicPoissonSampling(N, B)
    both = sampling.dataset(X, Y).concatenate(sampling.dataset(X[OTHER_ORDER], Y[OTHER_ORDER]))
    with pytest.raises(SamplingError, match="rows in another order"):
        make_model().fit(both, verbose=0)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
