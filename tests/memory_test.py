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
    assert memory.bytes_of_forward_pass(graph, rows) == 40 + 20 + (4 if rows is None else 20)


@pytest.mark.parametrize("layer", [LAYERS.LSTM, LAYERS.GRU])
def test_steps_of_recurrent_layers_are_counted(layer):
    made = layer(16)

    def counted(steps):
        called = tf.function(lambda x: made(x, training=True), autograph=False)
        graph = called.get_concrete_function(tf.TensorSpec([None, steps, 4])).graph
        return memory.bytes_of_forward_pass(graph, None)

    short, middle, long = map(counted, (10, 20, 40))
    # A step makes at least its gates and its state, of 16 floats each.
    assert middle - short >= 10 * 4 * 16 * 4
    assert long - middle == 2 * (middle - short)


@pytest.mark.parametrize(
    "forward_bytes, expected_rows, multiple, size",
    [
        (1000, 8, 1, None),  # 10 rows, 8 of which are expected
        (1000, 9, 1, 10),
        (1000, 9, 4, 8),
        (1000, 100, 16, 16),  # at least one unit
        (50_000, 1, 1, 1),
        (0, 10**6, 1, None),  # nothing is known
    ],
)
def test_as_many_rows_as_fit(monkeypatch, forward_bytes, expected_rows, multiple, size):
    monkeypatch.setattr(memory, "MEMORY_BUDGET", 50_000)
    if not forward_bytes:
        monkeypatch.setattr(memory, "MEMORY_BUDGET", 2**32)
    assert memory.rows_at_a_time(forward_bytes, expected_rows, multiple) == size


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
    monkeypatch.setattr(memory, "MEMORY_BUDGET", 5 * BATCH * 450)
    for engine in ("layerwise", "vectorized"):
        make_model(gradient_engine=engine).fit(X, Y, batch_size=BATCH, verbose=0)
    assert chosen[0] is None and chosen[-1] is not None


@pytest.mark.parametrize("chunk_size", ["many", 0, 2.5])
def test_sizes_are_checked(chunk_size):
    with pytest.raises(GradientEngineError, match="chunk_size"):
        make_model(chunk_size=chunk_size)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
