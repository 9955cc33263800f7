# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""A batch in chunks: the same sums, no chunk too large, hardly a row for nothing."""

import numpy as np
import pytest
import tensorflow as tf

from dice_tf.engine import chunks
from dice_tf.engine.gradient_sums import GradientSums


def engine(x, y, sample_weight):
    """Sums of `weight * x * y`; its norms tell how many rows it was given."""
    losses = sample_weight * x * y
    rows = tf.fill(tf.shape(x), tf.cast(tf.shape(x)[0], tf.float32))
    return GradientSums(
        head=[tf.reduce_sum(losses, keepdims=True), None],
        residual=None,
        losses=losses,
        y_pred={"twice": 2 * x},
        norms=rows,
    )


CASES = [(1, 8, 1), (7, 8, 1), (8, 8, 1), (9, 8, 1), (520, 256, 1), (64, 256, 1), (10, 3, 1),
         (12, 8, 4), (20, 8, 4), (16, 256, 4)]  # fmt: skip


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize(("batch", "chunk_size", "multiple"), CASES)
def test_chunks_are_equal_and_as_few_as_possible(batch, chunk_size, multiple, jit_compile, known):
    random = np.random.default_rng(0)
    x, y, weights = random.normal(size=(3, batch)).astype("float32")
    spec = tf.TensorSpec([batch if known else None], tf.float32)

    @tf.function(input_signature=[spec] * 3, jit_compile=jit_compile)
    def run(*arrays):
        return tuple(chunks.sums_in_chunks(engine, *arrays, chunk_size, multiple))

    sums = GradientSums(*run(x, y, weights))
    np.testing.assert_allclose(sums.head[0], [np.sum(weights * x * y)], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sums.losses, weights * x * y, rtol=1e-6)
    np.testing.assert_array_equal(sums.y_pred["twice"], 2 * x)
    (size,) = set(sums.norms.numpy().tolist())
    number = len(sums.norms) // int(size)
    assert size <= chunk_size and size % multiple == 0
    assert number == -(-batch // chunk_size)
    # At most the rounding of each chunk is computed for nothing.
    assert number * size - batch < number * multiple


def test_without_a_chunk_size_the_engine_gets_the_batch():
    x = tf.ones([5])
    assert chunks.sums_in_chunks(engine, x, x, x, None).norms.numpy().tolist() == [5.0] * 5


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
