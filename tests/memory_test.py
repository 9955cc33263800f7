# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`chunk_size="auto"`: batches that are too large for memory are cut, others are not."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dice_tf.engine import chunks, memory
from dice_tf.errors import GradientEngineError
from dice_tf.training.optimizers import DiceSGDOptimizer
from dice_tf.training.run import run_of

LAYERS = keras.layers
RANDOM = np.random.default_rng(0)
BATCH = 12
X = RANDOM.normal(size=(BATCH, 6)).astype("float32")
Y = RANDOM.integers(0, 3, BATCH)


def make_model(**arguments):
    keras.utils.set_random_seed(0)
    stack = [LAYERS.Dense(8, activation="tanh"), LAYERS.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *stack])
    optimizer = DiceSGDOptimizer(
        0.5, l2_norm_clip=0.5, noise_multiplier=1.0, expected_batch_size=BATCH, noise_seed=0,
        **arguments,
    )  # fmt: skip
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.fixture
def chosen(monkeypatch):
    """The chunk sizes that steps are traced with."""
    sizes, in_chunks = [], chunks.sums_in_chunks

    def noting(engine, x, y, sample_weight, chunk_size, multiple=1):
        sizes.append(chunk_size)
        return in_chunks(engine, x, y, sample_weight, chunk_size, multiple)

    monkeypatch.setattr(chunks, "sums_in_chunks", noting)
    return sizes


@pytest.mark.parametrize("rows", [None, 7])
def test_every_output_with_the_batch_first_is_counted(rows):
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [rows, 5, 2])  # 40 bytes per row.
        half = tf.cast(x, tf.float16)  # 20
        tf.reshape(half, [-1 if rows is None else 35, 2])  # 4, or 5 rows of 4
        tf.ones([3, 1000])
        tf.reduce_sum(x)
    total = 40 + 20 + (4 if rows is None else 20)
    assert memory.bytes_of_forward_pass(graph, rows) == total + 6 * 40  # copies of the largest


@pytest.mark.parametrize("layer", [LAYERS.LSTM, LAYERS.GRU])
def test_steps_of_recurrent_layers_are_counted(layer):
    made = layer(16)

    def counted(steps):
        called = tf.function(lambda x: made(x, training=True), autograph=False)
        graph = called.get_concrete_function(tf.TensorSpec([None, steps, 4])).graph
        return memory.bytes_of_forward_pass(graph, None)

    short, middle, long = map(counted, (30, 60, 120))
    # A step makes at least its gates and its state, of 16 floats each.
    assert middle - short >= 30 * 4 * 16 * 4
    assert long - middle == 2 * (middle - short)


@pytest.mark.parametrize(
    "row_bytes, expected_rows, multiple, size",
    [
        (5000, 8, 1, None),  # 10 rows, 8 of which are expected
        (5000, 9, 1, 10),
        (5000, 9, 4, 8),
        (5000, 100, 16, 16),  # at least one unit
        (250_000, 1, 1, 1),
        (0, 10**6, 1, None),  # nothing is known
    ],
)
def test_as_many_rows_as_fit(monkeypatch, row_bytes, expected_rows, multiple, size):
    monkeypatch.setattr(memory, "MEMORY_BUDGET", 50_000)
    if not row_bytes:
        monkeypatch.setattr(memory, "MEMORY_BUDGET", 2**32)
    assert memory.rows_at_a_time(row_bytes, expected_rows, multiple) == size


def images(*layers, size=16):
    stack = [*layers, LAYERS.GlobalAveragePooling2D(), LAYERS.Dense(3)]
    return keras.Sequential([keras.Input((size, size, 8)), *stack])


def attention():
    inputs = keras.Input((48, 32))
    x = LAYERS.MultiHeadAttention(2, 16)(inputs, inputs) + inputs
    x = LAYERS.Dense(128, activation="relu")(LAYERS.LayerNormalization()(x))
    return keras.Model(inputs, LAYERS.Dense(3)(LAYERS.GlobalAveragePooling1D()(x)))


class Subclassed(keras.Model):
    """Nobody knows at how many places its layer is used."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = LAYERS.Conv2D(16, 3), LAYERS.Dense(3)

    def call(self, x):
        return self.last(keras.ops.mean(self.inner(x), (1, 2)))


MODELS = {
    "dense": lambda: keras.Sequential([keras.Input((64,)), LAYERS.Dense(512), LAYERS.Dense(3)]),
    "few places": lambda: images(LAYERS.Conv2D(9, 3), LAYERS.MaxPooling2D(7), LAYERS.Conv2D(64, 1)),
    "wide patches": lambda: images(LAYERS.Conv2D(4, 7)),
    "written down": lambda: images(LAYERS.Conv2D(32, 3), LAYERS.Conv2D(32, 3), size=24),
    "depthwise": lambda: images(LAYERS.DepthwiseConv2D(5), LAYERS.SeparableConv2D(16, 3)),
    "groups": lambda: images(LAYERS.Conv2D(32, 3, groups=4), LAYERS.GroupNormalization(4)),
    "transposed": lambda: images(LAYERS.Conv2DTranspose(16, 3, strides=2)),
    "attention": attention,
    "lstm": lambda: keras.Sequential([keras.Input((24, 16)), LAYERS.LSTM(64), LAYERS.Dense(3)]),
    "subclassed": Subclassed,
    "table": lambda: keras.Sequential(
        [keras.Input((24,)), LAYERS.Embedding(5000, 32), LAYERS.Flatten(), LAYERS.Dense(3)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_row_takes_less_than_is_estimated_and_not_by_much(name):
    """Against the peaks of TensorFlow's own allocator, with few rows and with many."""
    keras.utils.set_random_seed(0)
    model, few, many = MODELS[name](), 64, 256
    shape = (16, 16, 8) if name == "subclassed" else model.input_shape[1:]
    x, y = RANDOM.normal(size=(many, *shape)).astype("float32"), RANDOM.integers(0, 3, many)
    if name == "table":
        x = RANDOM.integers(0, 5000, (many, *shape))
    optimizer = DiceSGDOptimizer(
        0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=many, chunk_size=None
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    peaks = []
    for rows in (few, many):
        fit = lambda: model.fit(x[:rows], y[:rows], batch_size=rows, verbose=0)
        fit()  # The first one checks and compiles.
        tf.config.experimental.reset_memory_stats("CPU:0")
        fit()
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
    measured = (peaks[1] - peaks[0]) / (many - few)
    row_bytes = memory.bytes_of_row(model, run_of(model).checks.forward_bytes)
    # What a row of the inputs takes is there without any model.
    assert measured - 4 * np.prod(shape) <= row_bytes <= 12 * measured, (measured, row_bytes)


class Total(LAYERS.Layer):
    """Puts out a number without any axis."""

    def call(self, x):
        return keras.ops.sum(x)

    def compute_output_shape(self, shape):
        return ()


def test_patches_count_without_a_bias_and_scalars_do_no_harm():
    inputs = keras.Input((8, 8, 16))
    # Few places, so that nothing is written down.
    outputs = LAYERS.Conv2D(64, 3, strides=4, use_bias=False)(inputs)
    plain = memory.bytes_of_row(keras.Model(inputs, outputs), 1000)
    assert plain == 1000 + 2 * 4 * 2 * 2 * 3 * 3 * 16
    with_total = keras.Model(inputs, [outputs, Total()(outputs)])
    assert memory.bytes_of_row(with_total, 1000) == plain


def test_the_other_engine_keeps_the_gradient_of_a_row():
    model = make_model()
    count = 6 * 8 + 8 + 8 * 3 + 3
    assert memory.bytes_of_row(model, 1000, "vectorized") == 5 * (1000 + 4 * count)


def test_what_is_not_known_counts_as_much_as_it_can():
    model = Subclassed()
    model(tf.ones([1, 16, 16, 8]))
    assert memory.bytes_of_row(model, 1000) == memory.PEAK_OVER_FORWARD_PASS * 1000


def test_what_fits_is_computed_at_once(chosen, capsys):
    model = make_model()
    model.fit(X, Y, batch_size=BATCH, verbose=2)
    assert chosen == [None] and model.optimizer.chunk_size == "auto"
    assert model.optimizer.get_config()["chunk_size"] == "auto"
    assert "chunk_size" not in capsys.readouterr().out


@pytest.mark.parametrize("verbose", [0, 2])
@pytest.mark.parametrize("engine", ["layerwise", "vectorized"])
def test_what_does_not_fit_is_cut_says_so_and_changes_nothing(
    monkeypatch, chosen, capsys, engine, verbose
):
    weights = []
    for size in ("auto", None):
        # Of a row, the engine without closed forms keeps the gradient, too.
        budget = 15_000 if engine == "vectorized" else 3000
        monkeypatch.setattr(memory, "MEMORY_BUDGET", budget)
        model = make_model(chunk_size=size, gradient_engine=engine)
        model.fit(X, Y, batch_size=BATCH, epochs=3, shuffle=False, verbose=verbose)
        weights.append(np.concatenate([np.ravel(w) for w in model.get_weights()]))
    of_auto, of_none = set(chosen[:-1]), chosen[-1]
    (size,) = of_auto
    assert of_none is None and 2 <= size <= 8
    said = f"computes the gradients of {size} rows of a batch at a time" in capsys.readouterr().out
    assert said == bool(verbose)
    np.testing.assert_allclose(*weights, rtol=1e-5, atol=1e-6)


def test_gradients_of_single_examples_take_memory(monkeypatch, chosen):
    monkeypatch.setattr(memory, "MEMORY_BUDGET", 5 * BATCH * 450)  # vectorized: 5 times
    for engine in ("layerwise", "vectorized"):
        make_model(gradient_engine=engine).fit(X, Y, batch_size=BATCH, verbose=0)
    assert chosen[0] is None and chosen[-1] is not None


@pytest.mark.parametrize("chunk_size", ["many", 0, 2.5])
def test_sizes_are_checked(chunk_size):
    with pytest.raises(GradientEngineError, match="chunk_size"):
        make_model(chunk_size=chunk_size)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
