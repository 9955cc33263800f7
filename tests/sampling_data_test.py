# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Data sets of samplers: rows are gathered whole, checked, weighted, and fit for Keras."""

import collections
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from dice_tf.errors import SamplingError
from dice_tf.ledger import provenance
from dice_tf.sampling import CyclicPoissonSampling, PoissonSampling, ShuffledEpochs

ALL = [PoissonSampling, CyclicPoissonSampling, ShuffledEpochs]
Pair = collections.namedtuple("Pair", ["left", "right"])


class Source:
    """Random access to (features, label) pairs, one element at a time."""

    def __init__(self, element, size=50):
        self.element, self.size = element, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.element(index)


class BulkSource(Source):
    """The same, many at a time; single access is only used to learn the structure."""

    def __getitem__(self, index):
        assert index == 0
        return super().__getitem__(index)

    def __getitems__(self, indices):
        return [self.element(i) for i in indices]


def image(i):
    return np.full((2, 3), i, dtype=np.float32)


IMAGES = np.stack([image(i) for i in range(50)])
NUMBERS = np.arange(50)


@pytest.mark.parametrize(
    "x, y",
    [
        (IMAGES, NUMBERS),
        (tf.constant(IMAGES), tf.constant(NUMBERS)),
        (IMAGES, NUMBERS.tolist()),
        ({"image": IMAGES, "id": NUMBERS}, {"out": NUMBERS}),
        ((IMAGES, NUMBERS), NUMBERS),
        ([IMAGES, NUMBERS], [NUMBERS, IMAGES]),
        (Pair(IMAGES, NUMBERS), NUMBERS),
        (Source(lambda i: (image(i), i)), None),
        (BulkSource(lambda i: (image(i), i)), None),
        ([(image(i), i) for i in range(50)], None),
        (Source(lambda i: ({"image": image(i), "id": i}, i)), None),
        (Source(image), NUMBERS),
        (Source(lambda i: {"image": tf.constant(image(i)), "id": i}), None),
    ],
)
def test_rows_are_gathered_together(x, y):
    data = PoissonSampling(50, 10).dataset(x, y)
    rows = 0
    for batch_x, batch_y, w in data:
        present = w.numpy() > 0
        leaves = tf.nest.flatten([batch_x, [] if batch_y is None else batch_y])
        columns = [leaf.numpy().reshape(len(w), -1).astype(float) for leaf in leaves]
        assert len(columns) >= 2
        for column in columns:
            np.testing.assert_array_equal(column[:, 0], columns[0][:, 0])
            np.testing.assert_array_equal(column.min(axis=1), column.max(axis=1))
        assert len(set(columns[0][present, 0])) == present.sum()
        assert columns[0].min() >= 0 and columns[0].max() < 50
        rows += present.sum()
    assert rows > 20
    spec = data.element_spec
    for leaf in tf.nest.flatten(spec):
        if isinstance(leaf, tf.TensorSpec):
            assert leaf.shape[1:].is_fully_defined()


def test_structure_types_and_dtypes_are_kept():
    sampling = PoissonSampling(50, 10)
    x, y, w = sampling.dataset(Pair(IMAGES, NUMBERS), [NUMBERS, IMAGES]).element_spec
    assert isinstance(x, Pair) and isinstance(y, tuple)
    assert x.left == tf.TensorSpec((None, 2, 3), tf.float32) and x.right.dtype == tf.int64
    # Float64 follows `fit` on arrays; other types are left alone.
    assert sampling.dataset(NUMBERS.astype("float64")).element_spec[0].dtype == tf.float32
    assert sampling.dataset(NUMBERS.astype("uint8")).element_spec[0].dtype == tf.uint8
    assert sampling.dataset(Source(lambda i: (i / 2, i))).element_spec[0].dtype == tf.float32
    words = np.asarray([f"word {i}" for i in range(50)])
    for source in (words, words.tolist()):
        x, _, w = next(iter(sampling.dataset(source)))
        assert x.dtype == tf.string and x.numpy()[0].startswith(b"word ")


def test_ragged_rows_are_gathered():
    lengths = np.arange(50) % 4
    ragged = tf.RaggedTensor.from_row_lengths(np.repeat(NUMBERS, lengths), lengths)
    x, y, w = next(iter(PoissonSampling(50, 10).dataset(ragged, NUMBERS)))
    for row, number in zip(x.to_list(), y.numpy().tolist()):
        assert row == [number] * (number % 4)


def test_elements_that_are_no_pairs_can_be_mapped():
    source = Source(lambda i: {"image": image(i), "label": i})
    data = PoissonSampling(50, 10).dataset(source)
    data = data.map(lambda x, _, w: (x["image"], x["label"], w))
    x, y, w = next(iter(data))
    np.testing.assert_array_equal(x.numpy()[:, 0, 0], y.numpy())
    assert int(provenance.count_marks(w)) == 1


@pytest.mark.parametrize(
    "x, y, echoed",
    [
        (np.ones((49, 2)), None, ["`x`", "num_examples=50", "49 rows"]),
        (IMAGES, np.ones(51), ["`y`", "num_examples=50", "51 rows"]),
        ({"a": IMAGES, "b": {"c": np.ones(7)}}, None, ["`x['b']['c']`", "7 rows"]),
        ((IMAGES, np.ones(7)), None, ["`x[1]`", "7 rows"]),
        (IMAGES, np.float32(3.0), ["`y`", "None rows"]),
        (Source(image, size=51), None, ["num_examples=50", "51 elements"]),
        ([(1, 2)] * 3, None, ["num_examples=50", "3 elements"]),
        (tf.data.Dataset.from_tensor_slices(IMAGES), None, ["tf.data.Dataset", "arrays"]),
        (tf.sparse.from_dense(np.eye(50, dtype="float16")), None, ["`x`", "sparse", "float16"]),
        ([[1] * (i % 3 + 1) for i in range(50)], NUMBERS, ["one shape each", "(2,)", "Pad"]),
        (IMAGES, [[1] * (i % 3 + 1) for i in range(50)], ["`y`", "Pad them", "mask_zero"]),
        (
            {"a": np.asarray([np.ones(i % 3 + 1) for i in range(50)], dtype=object)},
            NUMBERS,
            ["`x['a']`", "Pad them", "mask_zero"],
        ),
    ],
)
def test_case_15_data_that_contradicts_the_declaration_is_refused(x, y, echoed):
    with pytest.raises(SamplingError) as caught:
        PoissonSampling(50, 10).dataset(x, y)
    for text in echoed:
        assert text in str(caught.value)


def test_elements_of_different_shape_are_refused_with_the_shapes():
    data = PoissonSampling(50, 25).dataset(Source(lambda i: (np.ones(i % 2 + 1), i)))
    with pytest.raises(tf.errors.OpError, match=r"one shape each(.|\n)*\(1,\), \(2,\)"):
        list(data)


def test_user_weights_are_gathered_and_carry_no_mark():
    weights = np.where(NUMBERS % 5 == 0, -0.0, NUMBERS / 10).astype("float64")
    data = CyclicPoissonSampling(50, 10).dataset(IMAGES, NUMBERS, sample_weight=weights)
    seen = 0
    for step, (_, y, w) in enumerate(data):
        assert int(provenance.count_marks(w)) == step % 2 + 1
        y, w = y.numpy(), w.numpy()
        present = w > 0
        np.testing.assert_allclose(w[present], y[present] / 10, rtol=1e-6)
        seen += present.sum()
    assert seen > 10


def test_weights_of_several_outputs_all_carry_the_mark():
    weights = {"b": np.ones(50), "a": NUMBERS / 10}
    data = PoissonSampling(50, 10).dataset(IMAGES, {"a": NUMBERS, "b": NUMBERS}, weights)
    for _, y, w in data:
        assert set(w) == {"a", "b"}
        assert [int(provenance.count_marks(leaf)) for leaf in w.values()] == [1, 1]
        drawn = w["b"].numpy() == 1
        np.testing.assert_allclose(w["a"].numpy()[drawn], y["a"].numpy()[drawn] / 10, rtol=1e-6)


@pytest.mark.parametrize(
    "weights, echoed",
    [
        (np.where(NUMBERS == 7, -0.5, 1.0), ["-0.5", "index 7"]),
        (np.where(NUMBERS == 9, np.nan, 1.0), ["nan", "index 9"]),
        (np.where(NUMBERS == 9, np.inf, 1.0), ["inf", "index 9"]),
        (np.ones((50, 2)), ["(50, 2)", "(50,)"]),
        ({"a": np.ones(50), "b": np.ones(49)}, ["sample_weight['b']", "(49,)"]),
    ],
)
def test_bad_weights_are_refused(weights, echoed):
    with pytest.raises(SamplingError) as caught:
        PoissonSampling(50, 10).dataset(IMAGES, NUMBERS, weights)
    for text in echoed:
        assert text in str(caught.value)


@pytest.mark.parametrize("seed", [None, 1])
def test_several_workers_that_do_not_meet_are_refused(monkeypatch, seed):
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    with pytest.raises(SamplingError, match="2 workers"):
        PoissonSampling(50, 10, seed=seed).dataset(IMAGES)


def linear_model():
    model = keras.Sequential([keras.Input((2, 3)), keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-5), loss="mse")
    return model


class StepCounter(keras.callbacks.Callback):
    """Remembers the number of steps that Keras announces and makes."""

    def __init__(self):
        super().__init__()
        self.batches = []

    def on_epoch_begin(self, epoch, logs=None):
        self.batches.append(0)

    def on_train_batch_end(self, batch, logs=None):
        self.batches[-1] += 1


@pytest.mark.parametrize("kind", ALL)
def test_keras_fits_the_data_set(kind):
    sampling = kind(50, 8)
    model, counter = linear_model(), StepCounter()
    data = sampling.dataset(IMAGES, NUMBERS, planned_epochs=3)
    augmented = data.map(lambda x, y, w: (x + tf.random.normal(tf.shape(x)), y, w))
    history = model.fit(augmented, epochs=3, verbose=0, callbacks=[counter])
    steps = sampling.steps_per_epoch
    assert history.params["steps"] == steps == len(data)
    assert counter.batches == [steps] * 3
    assert int(model.optimizer.iterations) == 3 * steps
    assert len(history.history["loss"]) == 3


def test_keras_trains_on_features_alone_if_the_model_brings_its_loss():
    class Energy(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            self.add_loss(tf.reduce_mean(self.dense(keras.ops.reshape(x, (-1, 6))) ** 2))
            return x

    model = Energy()
    model.compile(keras.optimizers.SGD(1e-5))
    history = model.fit(PoissonSampling(50, 10).dataset(IMAGES), epochs=2, verbose=0)
    assert len(history.history["loss"]) == 2


def test_replicas_share_each_batch():
    devices = tf.config.list_logical_devices("CPU")
    strategy = tf.distribute.MirroredStrategy([d.name for d in devices] or None)
    data = CyclicPoissonSampling(50, 10).dataset(NUMBERS)
    for step, (_, _, w) in enumerate(strategy.experimental_distribute_dataset(data)):
        parts = strategy.experimental_local_results(w)
        assert sum(int(provenance.count_marks(part)) for part in parts) == step % 2 + 1


@pytest.mark.parametrize("sampling", [PoissonSampling(20, 4), ShuffledEpochs(20, 4)], ids=repr)
def test_nothing_is_left_to_tensorflow_to_tune(sampling):
    # The thread that tunes would be waited for as an iteration ends.
    data = sampling.dataset(np.zeros((20, 3)))
    assert data.options().autotune.enabled is False
    # Whoever wants it can have it.
    options = tf.data.Options()
    options.autotune.enabled = True
    assert data.with_options(options).options().autotune.enabled


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
