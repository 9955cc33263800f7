# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""Units of several rows: what is clipped as one.

A unit is K consecutive rows of a batch: views of one example, rows of one person, or a
microbatch. Its gradient is the mean of its rows' gradients. For closed forms that is nothing
new: with the loss of each row divided by the number of rows, the rows of a unit are further
positions of one example.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from dice_tf.engine.contributions import OuterProduct, PerExample, Rows
from dice_tf.errors import GradientEngineError


class Units(NamedTuple):
    r"""How the rows of a batch make up units.

    With \(\ell_r\) the loss of row r, its weight included, the gradient of a unit is

    \[g_u = \frac{1}{n_u} \sum_{r \in u} \nabla \ell_r,\]

    \(n_u\) the number of its rows that have a weight, and 0 if there is none. So a weight
    multiplies the gradient of a row as it does without units, and does not cancel where all
    rows of a unit have it. For microbatches \(n_u\) is K, whatever weights are.

    Attributes:
        rows: Int K, the number of consecutive rows of a unit.
        microbatches: Whether units are microbatches: a batch may then end within a unit, which
            is filled up with rows of weight 0.
    """

    rows: int = 1
    microbatches: bool = False


SINGLE_ROWS = Units()


def check_whole(x: Any, units: Units) -> None:
    """Refuses a batch that ends within a unit; while a step is traced, an assertion does.

    Args:
        x: Inputs, `[rows, ...]`.
        units: How rows make up units.

    Raises:
        GradientEngineError: If the number of rows is no multiple of those of a unit.
    """
    first = tf.nest.flatten(x)[0]
    if units.microbatches or units.rows == 1:
        return
    if first.shape[0] is not None and first.shape[0] % units.rows:
        raise GradientEngineError(
            "A batch must hold whole units, all rows of one after the other. Received: "
            f"{first.shape[0]} rows with rows_per_unit={units.rows}. Give each step a batch of "
            "`sampling.dataset(...)` as it was drawn."
        )
    if first.shape[0] is None:
        count: Any = tf.shape(first)[0]
        tf.debugging.assert_equal(
            count % units.rows, 0, f"A batch must hold whole units of {units.rows}."
        )


def fill_last(x: Any, y: Any, sample_weight: Any, units: Units) -> tuple[Any, Any, Any]:
    """Fills the last unit of a batch up with rows of weight 0.

    Args:
        x: Inputs, `[rows, ...]`.
        y: Targets.
        sample_weight: Nest of `[rows, ...]` weights.
        units: How rows make up units.

    Returns:
        `(x, y, sample_weight)` with a multiple of `units.rows` rows.
    """
    first, size = tf.nest.flatten(x)[0], units.rows
    if not units.microbatches or (first.shape[0] is not None and first.shape[0] % size == 0):
        return x, y, sample_weight
    batch = tf.shape(first)[0] if first.shape[0] is None else first.shape[0]
    places = tf.range((batch + size - 1) // size * size)
    real = tf.cast(places < batch, tf.float32)
    places = tf.minimum(places, tf.maximum(batch - 1, 0))
    take = lambda t: tf.gather(t, places)

    def take_weight(weight):
        weight = tf.cast(take(weight), tf.float32)
        return weight * tf.reshape(real, [-1] + [1] * (weight.shape.rank - 1))

    fill = tf.nest.map_structure
    return fill(take, x), fill(take, y), fill(take_weight, sample_weight)


def row_shares(sample_weight: Any, units: Units) -> Any:
    r"""Returns the share \(1 / n_u\) of every row in the gradient of its unit.

    Args:
        sample_weight: Nest of `[rows, ...]` weights, whole units.
        units: How rows make up units.

    Returns:
        Float32 `[rows]`, 0 for rows without weight.

    Example:

    >>> row_shares(tf.constant([1.0, 2.0, 0.5, 0.0]), Units(2)).numpy().tolist()
    [0.5, 0.5, 1.0, 0.0]
    """
    present = present_rows(sample_weight, tf.shape(tf.nest.flatten(sample_weight)[0])[0])
    if units.microbatches:
        return tf.fill(tf.shape(present), 1.0 / units.rows)
    grouped = tf.reshape(present, [-1, units.rows])
    counts = tf.reduce_sum(grouped, 1, keepdims=True)
    return tf.reshape(tf.math.divide_no_nan(grouped, counts), [-1])


def present_rows(sample_weight: Any, rows: Any) -> Any:
    """Returns float32 `[rows]`, 1 for rows with a weight, 0 for padding.

    Args:
        sample_weight: `None`, which is weight 1, a `[rows, ...]` tensor or a nest of both.
        rows: Int tensor, the number of rows.
    """
    present, weights = tf.zeros([rows]), tf.nest.flatten(sample_weight)
    if any(weight is None for weight in weights):
        return tf.ones([rows])  # For one output at least.
    for weight in weights:
        weight = tf.reshape(tf.cast(weight, tf.float32), [rows, -1])
        present = tf.maximum(present, tf.cast(tf.reduce_any(weight != 0, axis=1), tf.float32))
    return present


def present_units(sample_weight: Any, rows: Any, size: int) -> Any:
    """Returns float32 `[units]`, 1 for units that have a row with a weight, 0 for padding.

    Args:
        sample_weight: As for `present_rows`.
        rows: Int tensor, the number of rows. The last unit may lack some.
        size: Int, rows of a unit.
    """
    present = present_rows(sample_weight, rows)
    if size == 1:
        return present
    missing: Any = tf.math.floormod(-rows, size)
    whole = tf.pad(present, [[0, missing]])
    return tf.reduce_max(tf.reshape(whole, [-1, size]), 1)


def count_present(sample_weight: Any, rows: Any, size: int) -> Any:
    """Returns the number of units that have a row with a weight, as a float32 scalar.

    Args:
        sample_weight: As for `present_rows`.
        rows: Int tensor, the number of rows.
        size: Int, rows of a unit.
    """
    return tf.reduce_sum(present_units(sample_weight, rows, size))


def in_units(contribution: Any, size: int) -> Any:
    """Returns the contribution of units in place of that of their rows.

    Args:
        contribution: `PerExample`, `OuterProduct` or `Rows` of a batch.
        size: Int, consecutive rows of a unit.

    Returns:
        A contribution whose batch axis counts units. No product is computed.

    Raises:
        GradientEngineError: If the contribution is of another class.

    Example:

    >>> rows = PerExample(tf.constant([[1.0], [2.0], [3.0], [4.0]]))
    >>> in_units(rows, 2).gradients.numpy().tolist()
    [[3.0], [7.0]]
    """
    if size == 1:
        return contribution
    if isinstance(contribution, OuterProduct):
        return OuterProduct(
            _more_positions(contribution.upright(), size),
            _more_positions(contribution.cotangents, size),
            shape=contribution.shape,
            layout=contribution.layout,
        )
    if isinstance(contribution, Rows):
        return Rows(
            _more_positions(contribution.ids[..., None], size)[..., 0],
            _more_positions(contribution.cotangents, size),
            shape=contribution.shape,
        )
    if isinstance(contribution, PerExample):
        return PerExample(tf.reduce_sum(by_unit(contribution.gradients, size), 1))
    raise GradientEngineError(
        "Only contributions of dice_tf's own classes can be added up over the rows of a unit "
        "(PerExample, OuterProduct, Rows). Received: "
        f"{type(contribution).__name__}. Return one of them from the rule, or set "
        "gradient_engine='vectorized'."
    )


def by_unit(tensor: Any, size: int) -> Any:
    """Reshapes `[rows, ...]` to `[units, size, ...]`.

    Args:
        tensor: Any tensor whose number of rows is a multiple of `size`.
        size: Int, consecutive rows of a unit.
    """
    tensor = tf.convert_to_tensor(tensor)
    known = tensor.shape[0]
    units = tf.shape(tensor)[0] // size if known is None else known // size
    rest = tensor.shape[1:]
    if not rest.is_fully_defined():
        rest = tf.shape(tensor)[1:]
    grouped = tf.reshape(tensor, tf.concat([[units, size], rest], 0))
    static = None if known is None else known // size
    return tf.ensure_shape(grouped, [static, size, *tensor.shape[1:]])


def _more_positions(tensor, size):
    """Makes rows of a unit positions: `[rows, (groups,) positions, f]` to units."""
    grouped = by_unit(tensor, size)
    if grouped.shape.rank == 5:
        grouped = tf.transpose(grouped, [0, 2, 1, 3, 4])
    *leading, _, positions, features = grouped.shape
    dynamic = tf.shape(grouped)
    merged = tf.reshape(grouped, tf.concat([dynamic[:-3], [size * dynamic[-2]], dynamic[-1:]], 0))
    positions = None if positions is None else size * positions
    return tf.ensure_shape(merged, [*leading, positions, features])
