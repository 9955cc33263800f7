# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""One squared norm for all uses of a variable: that of the sum of their contributions."""

import tensorflow as tf

from dice_tf.engine import gram
from dice_tf.engine.contributions import OuterProduct, PerExample, Rows, WrittenDownProduct
from dice_tf.mechanism import rounding


def merged(contributions, batch):
    """Returns the squared norms of a sum of contributions, and parts to be summed.

    Args:
        contributions: List of contributions to one variable, from all of its uses.
        batch: Static batch size, or `None`.

    Returns:
        Pair of float32 `[batch]`, the squared norm of every example's *sum* over uses,
        and a list of contributions whose weighted sums add up to the variable's.
    """
    outer = [c for c in contributions if isinstance(c, OuterProduct)]
    rows = [c for c in contributions if isinstance(c, Rows)]
    if (
        len(outer) + len(rows) < len(contributions)
        or not _same_layout(outer)
        or (outer and rows and outer[0].layout is not None)
    ):
        if len(contributions) > 1:
            total = tf.add_n([c.materialised() for c in contributions])
            contributions = [PerExample(total)]
        return contributions[0].squared_norms(), contributions
    outer = [_concatenated_outer(outer)] if outer else []
    rows = [_concatenated_rows(rows)] if rows else []
    if outer and rows:
        squares = rows[0].squared_norms(), outer[0].squared_norms()
        inner, lost = _inner_products(rows[0], outer[0])
        return gram.safe_total(tf.stack([*squares, 2 * inner, 2 * lost], 1)), rows + outer
    if outer and outer[0].positions != 1 and not outer[0].prefers_gram(batch):
        outer = [WrittenDownProduct(outer[0])]
    return (outer + rows)[0].squared_norms(), outer + rows


def small_matrices(part, batch):
    """Returns the Gram matrices of a variable, if small ones are the way to its norms, else `None`.

    Args:
        part: The only contribution to the variable.
        batch: Static batch size, or `None`.

    Returns:
        `gram.Matrices`, for `gram.squared_norms_of`, or `None`.
    """
    if type(part) is not OuterProduct or part.grouped or not part.prefers_gram(batch):
        return None
    if not 1 < (part.positions or 0) <= gram.MOST_POSITIONS_KEPT:
        return None
    k, f = part.sizes()
    if gram.worth_compiling(part.positions, k, f):
        return None
    return gram.matrices(part.inputs, part.cotangents, transposed=part.transposed)


def _same_layout(outer):
    layouts = {(c.grouped, c.layout, c.sizes()) for c in outer}
    return len(layouts) <= 1


def _concatenated_outer(outer):
    """One outer product over all uses: the Gram matrix then holds the cross terms."""
    first = outer[0]
    if len(outer) == 1:
        return first
    axis = 2 if first.grouped else 1
    return OuterProduct(
        tf.concat([c.upright() for c in outer], axis),
        tf.concat([c.cotangents for c in outer], axis),
        shape=first.shape,
        layout=first.layout,
    )


def _concatenated_rows(rows):
    if len(rows) == 1:
        return rows[0]
    ids = tf.concat([tf.cast(c.ids, rows[0].ids.dtype) for c in rows], 1)
    return Rows(ids, tf.concat([c.cotangents for c in rows], 1), shape=rows[0].shape)


def _inner_products(rows, outer):
    r"""Returns \(\langle g^{rows}_i, g^{outer}_i \rangle\), and what rounding may take off.

    Row `ids[t]` of \(A^\top D\) is \(\sum_s A_{s, ids[t]} D_s\), so only the looked-up
    columns of \(A\) are needed.
    """
    inside = rows.inside()
    ids = tf.where(inside, rows.ids, 0)
    columns = tf.gather(outer.upright(), ids, axis=2, batch_dims=1)  # [batch, s, t]
    columns = tf.where(inside[:, None], columns, 0.0)
    products = tf.matmul(outer.cotangents, rows.cotangents, transpose_b=True)
    norms = [tf.sqrt(gram.factor_squares(part.cotangents)) for part in (outer, rows)]
    largest = norms[0] * tf.linalg.matvec(tf.abs(columns), norms[1])
    operations = outer.cotangents.shape[-1] + rounding.MOST_ADDITIONS + 8
    lost = rounding.margin(operations) * tf.reduce_sum(largest, 1)
    return rounding.total_of_signed(gram.flat(columns * products)), lost
