# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""What one layer call contributes to the per-example gradients of one variable.

A contribution describes all \(g_i\) of a batch without writing them down, and answers
two questions: what are \(\lVert g_i \rVert^2\), and what is \(\sum_i w_i g_i\)? A
variable that is used several times has several contributions, whose sum is its gradient.
"""

import copy
import math
from typing import Any

import tensorflow as tf

from dice_tf.engine import gram
from dice_tf.errors import GradientEngineError
from dice_tf.mechanism import rounding

__all__ = ["OuterProduct", "PerExample", "Rows"]

# Relative to squares of float32 numbers that cancel.
_ROUNDING = 2.0**-23
# Per-example gradients of one variable are written down only below this many bytes.
_MATERIALISED_BYTES = 256 * 2**20
_ASSUMED_BATCH = 256
_ASSUMED_POSITIONS = 128
# One entry of a materialised gradient costs, to write and to read twice, about as much as this
# many multiplications of a Gram matrix (measured on two CPU cores with AVX-512).
_ENTRY_COST = 16
# A second product for some examples only pays where it costs this much more, per example
# and position, than picking out their inputs and cotangents.
_ROWS_WORTH_PICKING = 64
# Entries of a variable from which one product with gradients that are written down, and a branch
# for the rest, cost less than both sums in one product, which takes two to three times as long.
_WORTH_A_BRANCH = 2**13
# Entries of a variable below which a copy of its gradients costs less than their operations.
_MOST_POOLED = 2**10


class PerExample:
    r"""Per-example gradients written down: \(g_i\) is row i of a tensor.

    Args:
        gradients: `[batch, *variable.shape]`.

    Example:

    >>> contribution = PerExample(tf.constant([[3.0, 4.0], [1.0, 0.0]]))
    >>> contribution.squared_norms().numpy().tolist()
    [25.0, 1.0]
    >>> [s.numpy().tolist() for s in contribution.weighted_sums([tf.constant([1.0, 2.0])])]
    [[5.0, 4.0]]
    """

    def __init__(self, gradients: Any) -> None:
        self.gradients = tf.cast(gradients, tf.float32)

    def squared_norms(self):
        """Returns float32 `[batch]`, the squared norm of every row."""
        return rounding.sums_of_squares(_flat_rows(self.gradients))

    def weighted_sums(self, weights):
        """Returns one weighted sum of rows per entry of `weights`, in the variable's layout."""
        sums = tf.matmul(tf.stack(weights), _flat_rows(self.gradients))
        shape = self.gradients.shape[1:]
        return [_shaped(s, shape) for s in tf.unstack(sums, num=len(weights))]

    def weighted_sum_of(self, rows, weights):
        """Returns the weighted sum of the gradients of some examples, int32 `[rows]`."""
        # Picking out rows would copy as much as is read without it.
        of_all = tf.scatter_nd(rows[:, None], weights, tf.shape(self.gradients)[:1])
        return self.weighted_sums([of_all])[0]

    def prefers_rows(self):
        """Whether `heads_and_residuals` is cheaper than both weighted sums in one product."""
        size = self.gradients.shape[1:].num_elements()
        return size is not None and size >= _WORTH_A_BRANCH

    def without(self, broken):
        """Returns the same contribution with the rows of `broken` examples set to 0."""
        return PerExample(_clear(self.gradients, broken))

    def materialised(self):
        """Returns the gradients, `[batch, *variable.shape]`."""
        return self.gradients


class OuterProduct:
    r"""A product of inputs and cotangents summed over positions: \(g_i = A_i^\top D_i\).

    Args:
        inputs: \(A\), `[batch, positions, k]` or, for weights that act on groups
            independently, `[batch, groups, positions, k]`. With `transposed`, the last
            two axes change places.
        cotangents: \(D\), `[batch, positions, f]` or `[batch, groups, positions, f]`.
        shape: Shape of the variable.
        layout: How a `[k, f]` or `[groups, k, f]` product becomes the variable, if a
            reshape to `shape` is not enough: a pair of tuples, the shape to give the
            product and the permutation of its axes after that.
        transposed: Whether `inputs` has positions last.

    Example: a dense kernel, with one position per example.

    >>> inputs, cotangents = tf.constant([[[1.0, 2.0]]]), tf.constant([[[3.0]]])
    >>> OuterProduct(inputs, cotangents, shape=(2, 1)).squared_norms().numpy().tolist()
    [45.0]
    """

    def __init__(
        self,
        inputs: Any,
        cotangents: Any,
        *,
        shape: Any,
        layout: Any = None,
        transposed: bool = False,
    ) -> None:
        self.inputs = tf.cast(inputs, tf.float32)
        self.cotangents = tf.cast(cotangents, tf.float32)
        self.shape = tuple(shape)
        self.layout = layout
        self.transposed = transposed

    @property
    def grouped(self):
        """Whether there is an axis of independent groups."""
        return self.inputs.shape.rank == 4

    @property
    def positions(self):
        """Static number of positions, or `None`."""
        return self.cotangents.shape[-2]

    def upright(self):
        """Returns the inputs with positions before features."""
        return tf.linalg.matrix_transpose(self.inputs) if self.transposed else self.inputs

    def entries(self):
        """Number of entries of one per-example gradient."""
        return math.prod(self.shape)

    def to_variable(self, total):
        """Brings a `[groups, k, f]` or `[k, f]` tensor to the variable's shape."""
        if self.layout is not None:
            dims, order = self.layout
            total = tf.transpose(tf.reshape(total, dims), order)
        return _shaped(total, self.shape)

    def prefers_gram(self, batch):
        """Whether Gram matrices are cheaper, or the only way within the memory cap.

        Writing gradients down costs one product and two readings, and spares the weighted sums,
        which are about one product; Gram matrices cost `positions**2 (k + f)`.
        """
        groups = self.inputs.shape[1] if self.grouped else 1
        positions = self.positions or _ASSUMED_POSITIONS
        k, f = self.sizes()
        if 4 * (batch or _ASSUMED_BATCH) * self.entries() > _MATERIALISED_BYTES:
            return True
        if 4 * (batch or _ASSUMED_BATCH) * groups * positions**2 > _MATERIALISED_BYTES:
            return False
        return gram_is_cheaper(positions, k, f)

    def sizes(self):
        """Returns the two sizes of the product, `(k, f)`."""
        k = self.inputs.shape[-2 if self.transposed else -1]
        return k, self.cotangents.shape[-1]

    def squared_norms(self):
        r"""Returns \(\sum_{s,t} (A_i A_i^\top)_{st} (D_i D_i^\top)_{st}\), float32 `[batch]`."""
        if self.positions == 1:
            inputs = gram.factor_squares(self.upright()[..., 0, :])
            products = inputs * gram.factor_squares(self.cotangents[..., 0, :])
            return rounding.total(products) if self.grouped else products
        return gram.squared_norms(self.inputs, self.cotangents, transposed=self.transposed)

    def weighted_sums(self, weights):
        """Returns one weighted sum of per-example gradients per entry of `weights`."""
        inputs = self.upright()
        trailing = [1] * (self.cotangents.shape.rank - 1)
        scaled = [self.cotangents * tf.reshape(w, [-1, *trailing]) for w in weights]
        scaled = tf.concat(scaled, -1) if len(weights) > 1 else scaled[0]
        if self.grouped:
            sums = tf.einsum("bgtk,bgtf->gkf", inputs, scaled)
        else:
            k, f = self.sizes()
            inputs = tf.reshape(inputs, [-1, k])
            sums = tf.matmul(inputs, tf.reshape(scaled, [-1, f * len(weights)]), transpose_a=True)
        return [self.to_variable(s) for s in tf.split(sums, len(weights), axis=-1)]

    def weighted_sum_of(self, rows, weights):
        """Returns the weighted sum of the gradients of some examples, int32 `[rows]`."""
        picked = OuterProduct(
            tf.gather(self.inputs, rows),
            tf.gather(self.cotangents, rows),
            shape=self.shape,
            layout=self.layout,
            transposed=self.transposed,
        )
        return picked.weighted_sums([weights])[0]

    def prefers_rows(self):
        """Whether `heads_and_residuals` is cheaper than two weighted sums."""
        k, f = self.sizes()
        return k * f >= _ROWS_WORTH_PICKING * (k + f)

    def without(self, broken):
        """Returns the same contribution with the rows of `broken` examples set to 0."""
        return OuterProduct(
            _clear(self.inputs, broken),
            _clear(self.cotangents, broken),
            shape=self.shape,
            layout=self.layout,
            transposed=self.transposed,
        )

    def products(self):
        """Returns the per-example products, `[batch, k, f]` or `[batch, groups, k, f]`."""
        return tf.matmul(self.inputs, self.cotangents, transpose_a=not self.transposed)

    def turned(self):
        """Returns the product with the factors exchanged: its gradients are transposed."""
        return OuterProduct(self.cotangents, self.upright(), shape=self.shape)

    def materialised(self):
        """Returns the gradients, `[batch, *variable.shape]`."""
        gradients = self.products()
        if self.layout is not None:
            dims, order = self.layout
            gradients = tf.reshape(gradients, [-1, *dims])
            gradients = tf.transpose(gradients, [0, *(axis + 1 for axis in order)])
        return tf.reshape(gradients, [-1, *self.shape])


class WrittenDownProduct(PerExample):
    """The per-example products of an `OuterProduct`, in the layout of the product."""

    def __init__(self, product, gradients=None):
        k, f = product.sizes()
        # The smaller factor is better the left one, which has to be transposed.
        self._turned = k > f and not product.transposed
        if gradients is None:
            gradients = (product.turned() if self._turned else product).products()
        super().__init__(gradients)
        self._product = product

    def weighted_sums(self, weights):
        """Returns one weighted sum of rows per entry of `weights`, in the variable's layout."""
        sums = super().weighted_sums(weights)
        if self._turned:
            sums = [tf.linalg.matrix_transpose(s) for s in sums]
        return [self._product.to_variable(s) for s in sums]

    def without(self, broken):
        """Returns the same contribution with the rows of `broken` examples set to 0."""
        return WrittenDownProduct(self._product, _clear(self.gradients, broken))


class Pooled(PerExample):
    """Per-example gradients of several small variables, side by side in one tensor.

    A model has hundreds of them, and TensorFlow takes longer to make their operations ready,
    and to call them, than to run them.

    Args:
        contributions: `{key: PerExample}`, by variable.
    """

    def __init__(self, contributions):
        self._shapes = {key: c.gradients.shape[1:] for key, c in contributions.items()}
        super().__init__(tf.concat([_flat_rows(c.gradients) for c in contributions.values()], 1))

    @staticmethod
    def takes(contributions):
        """Whether all that contributes to a variable is a few numbers per example."""
        first = contributions[0]
        if len(contributions) > 1 or type(first) is not PerExample:
            return False
        size = first.gradients.shape[1:].num_elements()
        return size is not None and size < _MOST_POOLED

    def by_variable(self, total):
        """Returns `{key: sum}`, the parts of a weighted sum."""
        parts = tf.split(total, [shape.num_elements() for shape in self._shapes.values()])
        shaped = map(_shaped, parts, self._shapes.values())
        return dict(zip(self._shapes, shaped, strict=True))

    def without(self, broken):
        """Returns the same contribution with the rows of `broken` examples set to 0."""
        cleared = copy.copy(self)
        cleared.gradients = _clear(self.gradients, broken)
        return cleared


class Rows:
    r"""Cotangents of looked-up rows: row `ids[i, t]` of \(g_i\) gets `cotangents[i, t]`.

    Ids may repeat. No `[batch, rows, dim]` tensor is made.

    Args:
        ids: Integer `[batch, positions]`, 0 for the first row; negative ones name none.
        cotangents: `[batch, positions, dim]`.
        shape: Shape of the variable, `(rows, dim)`.

    Example:

    >>> twice = Rows(tf.constant([[1, 1]]), tf.constant([[[3.0], [4.0]]]), shape=(2, 1))
    >>> twice.squared_norms().numpy().round(3).tolist()
    [49.0]
    """

    def __init__(self, ids: Any, cotangents: Any, *, shape: Any) -> None:
        self.ids = ids
        self.cotangents = tf.cast(cotangents, tf.float32)
        self.shape = tuple(shape)

    def inside(self):
        """Returns bool `[batch, positions]`, whether an id is one of a row of the table."""
        return (self.ids >= 0) & (self.ids < tf.cast(self.shape[0], self.ids.dtype))

    def squared_norms(self):
        """Returns float32 `[batch]`, squared norms with repeated ids added up first.

        By sorting: a Gram matrix takes as long, and loses digits where cotangents cancel.
        Large ones that cancel still count a little, as in `gram.safe_total`: in a sum they
        round other examples away. A row that is the sum of m cotangents is off by at most
        m - 1 rounding units times the sum of their norms, by which the norm is raised.
        """
        positions, dim = self.ids.shape[1], self.shape[1]
        shape = tf.unstack(tf.shape(self.ids))
        if positions is not None:
            shape[1] = positions
        # Equal ids of an example share a slot: the first place of their number in order.
        slots = tf.searchsorted(tf.sort(self.ids, axis=1), self.ids)
        slots += tf.range(shape[0])[:, None] * shape[1]
        by_row = lambda values, size: tf.reshape(
            tf.math.unsorted_segment_sum(
                tf.reshape(values, [-1, size]), tf.reshape(slots, [-1]), shape[0] * shape[1]
            ),
            [shape[0], shape[1] * size],
        )
        each = rounding.sums_of_squares(self.cotangents)
        added = by_row(tf.ones_like(each), 1)
        lost = rounding.margin(tf.maximum(added - 1, 0)) * by_row(tf.sqrt(each), 1)
        squares = rounding.sums_of_squares(by_row(self.cotangents, dim))
        squares = _squared_sum(squares, rounding.sums_of_squares(lost))
        return squares + _ROUNDING * rounding.total(each)

    def weighted_sums(self, weights):
        """Returns one weighted sum of per-example gradients per entry of `weights`."""
        ids = tf.reshape(self.ids, [-1])
        scaled = [
            tf.reshape(self.cotangents * w[:, None, None], [-1, self.shape[1]]) for w in weights
        ]
        return [tf.math.unsorted_segment_sum(s, ids, self.shape[0]) for s in scaled]

    def weighted_sum_of(self, rows, weights):
        """Returns the weighted sum of the gradients of some examples, int32 `[rows]`."""
        picked = Rows(tf.gather(self.ids, rows), tf.gather(self.cotangents, rows), shape=self.shape)
        return picked.weighted_sums([weights])[0]

    def prefers_rows(self):
        """Whether `heads_and_residuals` is cheaper than two weighted sums: always."""
        return True

    def without(self, broken):
        """Returns the same contribution with the rows of `broken` examples set to 0."""
        return Rows(self.ids, _clear(self.cotangents, broken), shape=self.shape)

    def materialised(self):
        """Returns the gradients, `[batch, rows, dim]`; refused where that is large."""
        if 4 * _ASSUMED_BATCH * math.prod(self.shape) > _MATERIALISED_BYTES:
            raise GradientEngineError(
                f"An embedding of shape {self.shape} is also used in a way that has no closed "
                "form, so its per-example gradients would have to be written down, which takes "
                "too much memory. Use the weight only through Embedding or ReversibleEmbedding, "
                "or register a rule (dice_tf.register_rule)."
            )
        batch, rows = tf.shape(self.ids)[0], self.shape[0]
        slots = tf.cast(self.ids, tf.int32) + tf.range(batch)[:, None] * rows
        slots = tf.where(self.inside(), slots, -1)
        flat = tf.math.unsorted_segment_sum(
            tf.reshape(self.cotangents, [-1, self.shape[1]]),
            tf.reshape(slots, [-1]),
            batch * rows,
        )
        return tf.reshape(flat, [-1, *self.shape])


def _squared_sum(squares, other):
    """Returns the squared sum of two norms that are given as squares."""
    return squares + 2 * tf.sqrt(squares) * tf.sqrt(other) + other


def gram_is_cheaper(positions, k, f):
    """Whether Gram matrices of a `[k, f]` product over positions cost less than writing it down."""
    return positions**2 * (k + f) < _ENTRY_COST * k * f


def _flat_rows(tensor):
    if tensor.shape.rank == 2:
        return tensor
    return tf.reshape(tensor, [-1, math.prod(tensor.shape[1:])])


def _shaped(tensor, shape):
    """Reshapes, where there is something to do: hundreds of variables are vectors already."""
    return tensor if tensor.shape.as_list() == list(shape) else tf.reshape(tensor, shape)


def _clear(tensor, broken):
    broken = tf.reshape(broken, [-1] + [1] * (tensor.shape.rank - 1))
    return tf.where(broken, tf.zeros([], tensor.dtype), tensor)
