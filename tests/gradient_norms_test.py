# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`gradient_norms`: equal to a loop over examples, on public data only, and without a trace."""

import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import dice_tf
from dice_tf.errors import (
    GradientEngineError,
    LossError,
    MissingPackageError,
    ModelError,
    PlainGradientsError,
    SamplingError,
)

EXAMPLES = 11
CLASSES = 3
PRIVACY = dict(l2_norm_clip=0.5, noise_multiplier=1.0, expected_batch_size=4)


def dense_model(dtype):
    layers = [keras.Input((5,)), keras.layers.Dense(7, "tanh", dtype=dtype)]
    return keras.Sequential([*layers, keras.layers.Dense(CLASSES, dtype=dtype)])


def convolutional_model(dtype):
    inputs = keras.Input((8, 8, 2))
    x = keras.layers.Conv2D(4, 3, activation="relu", dtype=dtype)(inputs)
    x = keras.layers.GroupNormalization(2, dtype=dtype)(x)
    x = keras.layers.DepthwiseConv2D(3, padding="same", dtype=dtype)(x)
    x = keras.layers.GlobalAveragePooling2D(dtype=dtype)(x)
    return keras.Model(inputs, keras.layers.Dense(CLASSES, dtype=dtype)(x))


def recurrent_model(dtype):
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(9, 4, mask_zero=True, dtype=dtype)(inputs)
    x = keras.layers.LSTM(5, dtype=dtype)(x)
    return keras.Model(inputs, keras.layers.Dense(CLASSES, dtype=dtype)(x))


def frozen_model(dtype):
    model = dense_model(dtype)
    model.layers[0].trainable = False
    return model


def features_of(model, rng):
    shape = (EXAMPLES, *model.inputs[0].shape[1:])
    if model.inputs[0].dtype == "int32":
        return rng.integers(0, 9, shape).astype("int32")
    # Norms of many sizes.
    return rng.normal(size=shape) * np.geomspace(0.1, 5, EXAMPLES).reshape(
        [-1] + [1] * len(shape[1:])
    )


def problem(model):
    rng = np.random.default_rng(5)
    return (
        features_of(model, rng),
        rng.integers(0, CLASSES, EXAMPLES),
        rng.uniform(0.5, 3, EXAMPLES),
    )


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def norms_one_by_one(model, loss_of_row, rows=EXAMPLES):
    """The norm of each gradient by a tape of its own, in the float type of the model."""
    found = []
    for row in range(rows):
        with tf.GradientTape() as tape:
            loss = loss_of_row(slice(row, row + 1))
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        dense = [np.ravel(tf.convert_to_tensor(g)) for g in gradients if g is not None]
        found.append(np.linalg.norm(np.concatenate(dense).astype(np.float64)))
    return np.array(found)


@pytest.mark.parametrize(
    "make, chunk_size",
    [
        (dense_model, 256),
        (dense_model, 1),
        (convolutional_model, 256),
        (recurrent_model, 4),
        (frozen_model, 4),
    ],
)
def test_norms_are_those_of_a_loop_in_float64(make, chunk_size):
    keras.utils.set_random_seed(1)
    model, exact = make(None), make("float64")
    exact.set_weights(model.get_weights())
    x, y, weights = problem(model)
    model.compile("adam", crossentropy())
    loss = lambda row: crossentropy()(y[row], exact(x[row], training=True)) * weights[row]
    expected = norms_one_by_one(exact, loss)
    assert expected.max() > 3 * expected.min() > 0
    result = dice_tf.gradient_norms(model, (x, y, weights), chunk_size=chunk_size)
    np.testing.assert_allclose(result.norms, expected, rtol=1e-5)
    assert result.norms.dtype == np.float32


@pytest.mark.parametrize("engine", ["layerwise", "vectorized"])
def test_a_private_optimizer_uses_its_own_engine(engine):
    model = dense_model(None)
    x, y, _ = problem(model)
    model.compile(dice_tf.DiceSGDOptimizer(0.1, gradient_engine=engine, **PRIVACY), crossentropy())
    loss = lambda row: crossentropy()(y[row], model(x[row]))
    result = dice_tf.gradient_norms(model, (x, y), chunk_size=3)
    np.testing.assert_allclose(result.norms, norms_one_by_one(model, loss), rtol=1e-5)


def test_dict_inputs_several_outputs_loss_weights_and_weights_of_zero():
    inputs = {"a": keras.Input((3,), name="a"), "b": keras.Input((2,), name="b")}
    x = keras.layers.Dense(4, "relu")(keras.layers.Concatenate()([inputs["a"], inputs["b"]]))
    model = keras.Model(
        inputs,
        {"p": keras.layers.Dense(2, name="p")(x), "q": keras.layers.Dense(1, name="q")(x)},
    )
    model.compile("sgd", {"p": "mse", "q": "mae"}, loss_weights={"p": 0.3, "q": 2.0})
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=(EXAMPLES, *shape)).astype("float32")
    x, y = {"a": draw(3), "b": draw(2)}, {"p": draw(2), "q": draw(1)}
    weights = {"p": np.abs(draw()), "q": np.abs(draw())}
    weights["p"][2] = weights["p"][5] = weights["q"][5] = 0
    cut = lambda nest, row: {name: leaf[row] for name, leaf in nest.items()}

    def loss(row):
        of, w = model(cut(x, row)), cut(weights, row)
        squares = tf.reduce_mean((of["p"] - y["p"][row]) ** 2)
        distances = tf.reduce_mean(tf.abs(of["q"] - y["q"][row]))
        return 0.3 * w["p"][0] * squares + 2.0 * w["q"][0] * distances

    expected = np.delete(norms_one_by_one(model, loss), 5)
    for chunk_size in (256, 3):
        result = dice_tf.gradient_norms(model, (x, y, weights), chunk_size=chunk_size)
        np.testing.assert_allclose(result.norms, expected, rtol=1e-5)


def test_microbatches_give_one_norm_for_each_that_is_whole():
    model = dense_model(None)
    x, y, _ = problem(model)
    optimizer = dice_tf.DiceSGDOptimizer(0.1, num_microbatches=2, **PRIVACY)
    model.compile(optimizer, crossentropy())
    loss = lambda row: crossentropy()(
        y[2 * row.start : 2 * row.stop], model(x[2 * row.start : 2 * row.stop])
    )
    result = dice_tf.gradient_norms(model, (x, y), chunk_size=4)
    np.testing.assert_allclose(
        result.norms, norms_one_by_one(model, loss, EXAMPLES // 2), rtol=1e-5
    )
    with pytest.raises(GradientEngineError, match="multiple of the 2 rows"):
        dice_tf.gradient_norms(model, (x, y), chunk_size=3)
    with pytest.raises(SamplingError, match="1 examples in microbatches of 2"):
        dice_tf.gradient_norms(model, (x[:1], y[:1]))


def model_with_dropout(optimizer, seed=3):
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dense(CLASSES)])
    model.compile(optimizer, crossentropy(), metrics=["accuracy"])
    return model


def test_dropout_draws_as_in_training_and_seeds_are_given_back():
    model = model_with_dropout("sgd")
    x, y, _ = problem(model)
    seed = model.layers[1].seed_generator.state
    before = seed.numpy()
    first, again = (dice_tf.gradient_norms(model, (x, y)).norms for _ in range(2))
    np.testing.assert_array_equal(seed.numpy(), before)
    np.testing.assert_array_equal(first, again)
    # The masks that this seed draws for a batch of all examples.
    values = [v.value for v in model.trainable_variables]
    with tf.GradientTape() as tape:
        scores = model(x.astype("float32"), training=True)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=scores)
    jacobians = [tf.reshape(j, [EXAMPLES, -1]) for j in tape.jacobian(losses, values)]
    np.testing.assert_allclose(first, np.linalg.norm(np.hstack(jacobians), axis=1), rtol=1e-5)
    without = norms_one_by_one(model, lambda row: crossentropy()(y[row], model(x[row])))
    assert np.abs(first / without - 1).max() > 0.1


@pytest.mark.parametrize("private", [True, False])
def test_training_goes_on_as_if_nobody_had_looked(private):
    def run(look):
        optimizer = (
            dice_tf.DiceAdamOptimizer(0.1, noise_seed=4, **PRIVACY)
            if private
            else keras.optimizers.Adam(0.1)
        )
        model = model_with_dropout(optimizer)
        x, y, _ = problem(model)
        histories = []
        for _ in range(2):
            if look:
                built, steps = optimizer.built, int(optimizer.iterations)
                dice_tf.gradient_norms(model, (x, y), chunk_size=4)
                assert (optimizer.built, int(optimizer.iterations)) == (built, steps)
            histories.append(model.fit(x, y, batch_size=4, shuffle=False, verbose=0).history)
        metrics = [v.numpy() for v in model.metrics_variables]
        # The record names the draws of a process, by chance.
        state = [v.numpy() for v in optimizer.variables if "sampling_record" not in v.path]
        return [*model.get_weights(), *metrics, *state], histories

    (seen, seen_history), (unseen, history) = run(True), run(False)
    assert seen_history == history
    for one, other in zip(seen, unseen, strict=True):
        np.testing.assert_array_equal(one, other)


class Autoencoder(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(2)
        self.out = keras.layers.Dense(5)

    def call(self, x):
        return self.out(self.hidden(x))

    def train_step(self, data):
        x, *_ = data
        return super().train_step((x, x))


def test_a_train_step_that_makes_the_targets():
    x = np.random.default_rng(0).normal(size=(EXAMPLES, 5)).astype("float32")
    model = Autoencoder()
    model.compile(dice_tf.DiceSGDOptimizer(0.1, **PRIVACY), "mse")
    result = dice_tf.gradient_norms(model, (x, np.zeros(EXAMPLES)))
    loss = lambda row: tf.reduce_mean((model(x[row]) - x[row]) ** 2)
    np.testing.assert_allclose(result.norms, norms_one_by_one(model, loss), rtol=1e-5)
    model.compile("sgd", "mse")
    weights = model.get_weights()
    with pytest.raises(PlainGradientsError, match="Autoencoder.*overrides `train_step`"):
        dice_tf.gradient_norms(model, (x, x))
    for one, other in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture(scope="module")
def model():
    model = dense_model(None)
    model.compile("sgd", crossentropy())
    return model


SAMPLINGS = [
    dice_tf.PoissonSampling(100, 10),
    dice_tf.CyclicPoissonSampling(100, 10),
    dice_tf.ShuffledEpochs(100, 10),
    dice_tf.RandomAllocation(100, 10),
]
AFTERWARDS = {
    "as it is": lambda data: data,
    "mapped": lambda data: data.map(lambda x, y, w: (x, y)).prefetch(1),
    "regrouped": lambda data: data.unbatch().filter(lambda x, y, w: w > 0).batch(5).take(2),
    "cached, zipped": lambda data: tf.data.Dataset.zip(data.cache(), tf.data.Dataset.range(9)),
}


@pytest.mark.parametrize("change", AFTERWARDS)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: type(s).__name__)
def test_data_sets_of_a_sampler_are_refused_by_name(model, sampling, change):
    x, y = np.zeros((100, 5), "float32"), np.zeros(100)
    data = AFTERWARDS[change](sampling.dataset(x, y))
    with pytest.raises(SamplingError) as refusal:
        dice_tf.gradient_norms(model, data)
    message = str(refusal.value)
    assert repr(sampling) in message and "public examples" in message
    assert len(message.split()) <= 60


@pytest.mark.parametrize(
    "sampling", [s for s in SAMPLINGS if s.amplified], ids=lambda s: type(s).__name__
)
@pytest.mark.parametrize("kind", ["tensors", "arrays", "two outputs", "a third"])
def test_batches_of_a_sampler_are_refused_by_their_mark(model, sampling, kind):
    x, y = np.zeros((100, 5), "float32"), np.zeros(100)
    weights = {"a": np.ones(100), "b": None} if kind == "two outputs" else None
    for batch in sampling.dataset(x, y, weights).take(4):
        if kind == "arrays":
            batch = tuple(part.numpy() for part in batch)
        if kind == "a third":
            batch = (batch[0], batch[1], batch[2] / 3)
        with pytest.raises(SamplingError, match=r"of its sample weights \d+ are -0\.0, the mark"):
            dice_tf.gradient_norms(model, batch)


X, Y = np.zeros((6, 5), "float32"), np.zeros(6, "int32")
NO_BATCHES = {
    "a data set": (tf.data.Dataset.from_tensors((X, Y)), "Received: .*Dataset"),
    "no targets": ((X,), "Received: tuple of 1 parts"),
    "an array": (X, "Received: ndarray"),
    "a generator": (iter([(X, Y)]), "Received: list_iterator"),
    "rows that do not match": ((X, Y[:5]), r"shapes \[\(6, 5\), \(5,\)\]"),
    "a number": ((X, 1.0), r"shapes \[\(6, 5\), \(\)\]"),
    "ragged rows": ((tf.ragged.constant([[1.0], [2.0, 3.0]]), Y[:2]), "Ragged rows"),
    "no example": ((X[:0], Y[:0]), "no example has a weight"),
    "no weight": ((X, Y, np.zeros(6)), "Received: 6 examples"),
}


@pytest.mark.parametrize("case", NO_BATCHES)
def test_what_is_no_batch_of_examples_is_refused(model, case):
    batch, message = NO_BATCHES[case]
    with pytest.raises(SamplingError, match=message):
        dice_tf.gradient_norms(model, batch)


@pytest.mark.parametrize("chunk_size", [0, 2.5])
def test_chunk_sizes_are_checked(model, chunk_size):
    with pytest.raises(GradientEngineError, match="chunk_size"):
        dice_tf.gradient_norms(model, (X, Y), chunk_size=chunk_size)


class MinusMean(keras.layers.Layer):
    def call(self, inputs):
        return inputs - tf.reduce_mean(inputs, axis=0)


def test_models_that_could_not_be_trained_are_refused():
    rng = np.random.default_rng(0)
    batch = rng.normal(size=(6, 5)).astype("float32"), rng.integers(0, CLASSES, 6)

    def model_of(*layers, loss=None):
        model = keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dense(CLASSES)])
        model.compile("sgd", loss or crossentropy())
        return model

    cases = [
        (model_of(keras.layers.BatchNormalization()), ModelError, "statistics of the whole batch"),
        (model_of(MinusMean()), GradientEngineError, "depend on the other examples"),
        (model_of(loss=lambda y, p: tf.reduce_mean(p)), LossError, "one value per example"),
    ]
    uncompiled = keras.Sequential([keras.Input((5,)), keras.layers.Dense(CLASSES)])
    cases.append((uncompiled, LossError, "compiled without a loss"))
    for model, error, message in cases:
        with pytest.raises(error, match=message):
            dice_tf.gradient_norms(model, batch)


def test_gradients_that_are_not_finite_are_counted_and_left_out(model):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 5)).astype("float32"), rng.integers(0, CLASSES, 6)
    exact = dice_tf.gradient_norms(model, (x, y))
    x[4] = np.nan
    broken = dice_tf.gradient_norms(model, (x, y))
    assert np.isfinite(broken.norms).tolist() == [True] * 4 + [False, True]
    expected = np.quantile(np.delete(exact.norms, 4).astype(np.float64), 0.9)
    assert broken.quantiles[90] == pytest.approx(expected, rel=1e-6)
    assert "6 public gradients" in str(broken) and "1 that are not finite" in str(broken)
    with pytest.raises(LossError, match="6 norms"):
        dice_tf.gradient_norms(model, (np.full_like(x, np.inf), y))


def test_the_table_and_its_advice():
    norms = np.random.default_rng(0).lognormal(-1, 1, 500).astype("float32")
    table = dice_tf.GradientNorms(norms)
    text = " ".join(str(table).split())
    for percent in (10, 25, 50, 75, 90, 99):
        assert table.quantiles[percent] == pytest.approx(np.percentile(norms, percent), rel=1e-6)
        assert f" {percent} %" in text and f" {np.percentile(norms, percent):.3g} " in text
    assert f"start at the 10 % quantile, {np.percentile(norms, 10):.3g}," in text
    assert f"the usual start is the median, {np.percentile(norms, 50):.3g}." in text
    norms[:100] = 0
    text = " ".join(str(dice_tf.GradientNorms(norms)).split())
    assert f"start at the 25 % quantile, {np.percentile(norms, 25):.3g}," in text
    assert "All are 0" in str(dice_tf.GradientNorms(0 * norms))


@pytest.mark.parametrize("norms", [[0.1, 1.0, 20.0, 0.0, np.inf], [0.0, 0.0], [2.0]])
def test_the_plot_is_a_picture(tmp_path, norms):
    dice_tf.GradientNorms(np.array(norms, "float32")).plot(tmp_path / "norms.png")
    pixels = tf.io.decode_png((tmp_path / "norms.png").read_bytes(), channels=3).numpy()
    bars = (np.abs(pixels - np.array([77, 156, 201])) < 3).all(-1)
    assert pixels.shape == (600, 1125, 3) and bars.sum() > 1000


def test_the_plot_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match="pip install matplotlib"):
        dice_tf.GradientNorms(np.ones(2, "float32")).plot(tmp_path / "norms.png")


TWO_DEVICES = """
import keras, numpy as np, tensorflow as tf
import dice_tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(10, 5)).astype("float32"), rng.normal(size=(10, 1)).astype("float32")
def norms(strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((5,)), *layers])
        model.compile(dice_tf.DiceSGDOptimizer(
            0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4), "mse")
    before = [v.numpy() for v in model.variables]
    found = [dice_tf.gradient_norms(model, (x, y), chunk_size=4).norms for _ in range(2)]
    np.testing.assert_array_equal(*found)
    for v, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(v.numpy(), value)
    return found[0]
two = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
assert two.num_replicas_in_sync == 2
np.testing.assert_allclose(norms(two), norms(tf.distribute.get_strategy()), rtol=1e-5)
print("equal")
"""


def test_a_mirrored_model_has_the_norms_of_one():
    root = str(pathlib.Path(__file__).parents[1])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [sys.executable, "-c", TWO_DEVICES],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.stdout.endswith("equal\n"), process.stderr[-3000:]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
