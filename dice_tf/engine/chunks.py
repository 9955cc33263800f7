# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradient sums of a large batch, a chunk of examples at a time.

A chunk only bounds memory: sums over chunks are the sums over the batch, and the
division by the public batch size, the noise and the feedback happen after them.
"""

import tensorflow as tf

from dice_tf.engine.gradient_sums import GradientSums


def sums_in_chunks(engine, x, y, sample_weight, chunk_size, multiple=1):
    """Runs a gradient engine over chunks of the batch and adds up its sums.

    Args:
        engine: Function from `(x, y, sample_weight)` to `GradientSums`.
        x: Inputs, `[batch, ...]`.
        y: Targets, `[batch, ...]`.
        sample_weight: `None` or `[batch, ...]`.
        chunk_size: Int, most examples per chunk, or `None` for the whole batch at once. The
            batch is cut into as few chunks as that allows, of equal size, so that
            hardly any rows are computed for nothing.
        multiple: Int, the size of a chunk is a multiple of it; divides `chunk_size`.

    Returns:
        `GradientSums` of the whole batch. The same as without chunks, to rounding.
    """
    if chunk_size is None:
        return engine(x, y, sample_weight)
    batch, rows_known = tf.shape(tf.nest.flatten(x)[0])[0], tf.nest.flatten(x)[0].shape[0]
    if sample_weight is None:
        sample_weight = tf.ones([batch])
    chunks, size = _split(batch, chunk_size, multiple, tf.maximum)
    if rows_known is not None:
        # As a number, so that a chunk has a known shape as well.
        size = _split(rows_known, chunk_size, multiple, max)[1]
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        # A replica's share may be empty; then a row of zeros, of weight 0, is its only chunk.
        pad = lambda t: tf.pad(t, [[0, 1]] + [[0, 0]] * (t.shape.rank - 1))
        x, y, sample_weight = tf.nest.map_structure(pad, (x, y, sample_weight))

    def chunk(index):
        rows = index * size + tf.range(size)
        real = tf.cast(rows < batch, tf.float32)
        rows = tf.minimum(rows, tf.maximum(batch - 1, 0))
        take = lambda t: tf.gather(t, rows)

        def take_weight(weight):
            weight = tf.cast(tf.gather(weight, rows), tf.float32)
            return weight * tf.reshape(real, [-1] + [1] * (weight.shape.rank - 1))

        return (
            tf.nest.map_structure(take, x),
            tf.nest.map_structure(take, y),
            tf.nest.map_structure(take_weight, sample_weight),
        )

    # The first chunk runs outside the loop: it shows which variables the loss reaches and
    # how the outputs are nested, which the loop must know beforehand.
    first = engine(*chunk(0))
    if chunk_size_covers_batch(x, chunk_size):
        return _cut(first, batch)
    rest = lambda sums: [sums.losses, sums.norms, *tf.nest.flatten(sums.y_pred)]
    arrays = [
        tf.TensorArray(t.dtype, size=chunks, element_shape=t.shape).write(0, t) for t in rest(first)
    ]

    def body(index, accumulated, arrays):
        sums = engine(*chunk(index))
        added = [a + s for a, s in zip(accumulated, _present(sums), strict=True)]
        arrays = [a.write(index, t) for a, t in zip(arrays, rest(sums), strict=True)]
        return index + 1, added, arrays

    _, accumulated, arrays = tf.while_loop(
        lambda index, *_: index < chunks,
        body,
        (tf.constant(1), _present(first), arrays),
        # TensorFlow would run chunks ahead of the sums, and keep up to ten of them in memory.
        parallel_iterations=1,
    )
    losses, norms, *outputs = (array.concat() for array in arrays)
    parts = iter(accumulated)
    fill = lambda like: None if like is None else [None if t is None else next(parts) for t in like]
    sums = GradientSums(
        head=fill(first.head),
        residual=fill(first.residual),
        losses=losses,
        y_pred=tf.nest.pack_sequence_as(first.y_pred, outputs),
        norms=norms,
    )
    return _cut(sums, batch)


def _split(batch, chunk_size, multiple, maximum):
    """Returns the number of chunks and their size, as ints or as tensors."""
    up = lambda number, divisor: (number + divisor - 1) // divisor
    chunks = maximum(up(batch, chunk_size), 1)
    return chunks, maximum(up(up(batch, chunks), multiple), 1) * multiple


def chunk_size_covers_batch(x, chunk_size):
    """Whether the batch is statically known to fit into one chunk."""
    batch = tf.nest.flatten(x)[0].shape[0]
    return batch is not None and batch <= chunk_size


def _present(sums):
    return [t for t in (*sums.head, *(sums.residual or ())) if t is not None]


def _cut(sums, batch):
    cut = lambda t: t[:batch]
    return sums._replace(losses=cut(sums.losses), y_pred=tf.nest.map_structure(cut, sums.y_pred))
