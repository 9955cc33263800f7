# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Several views of each row, drawn afresh: augmentation multiplicity."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from dice_tf.checks.arguments import check_integer
from dice_tf.errors import SamplingError

# So many rows are looked at before the first batch.
_ROWS = 6


def check_views(views: int, augment: Any) -> int:
    """Returns the number of views as an int.

    Args:
        views: Int >= 1.
        augment: `None` or a function.

    Raises:
        SamplingError: If `views` is below 1, or `augment` cannot be called.
    """
    views = check_integer("views", views, error=SamplingError)
    if augment is not None and not callable(augment):
        raise SamplingError(
            "Argument `augment` must be a function of a batch of features, such as a Keras "
            f"preprocessing layer. Received: augment={augment!r}."
        )
    return views


def with_views(fetch: Callable, views: int, augment: Callable | None) -> Callable:
    """Returns a function that fetches `views` views of each row, one row after the other.

    Args:
        fetch: Function from indices to `(x, y)`, from `data_sources.row_fetcher`.
        views: Int K >= 1.
        augment: Function of a nest of features `[rows, ...]` that returns as many. It is called
            for each view anew, so that views are independent also if it draws once for all
            rows. `None` for views that differ by what the model draws, as in Dropout.

    Returns:
        Function from int64 `[rows]` to `(x, y)` with K times as many rows: views side by side,
        with equal targets.
    """
    if views == 1 and augment is None:
        return fetch

    def fetch_views(indices):
        x, y = fetch(indices)
        seen = [x if augment is None else _augmented(augment, x) for _ in range(views)]
        together = lambda *leaves: _side_by_side(tf.stack(leaves, 1))
        x = tf.nest.map_structure(together, *seen)
        # The targets of a row are those of all its views, whatever `augment` does.
        repeat = lambda t: t if t is None else _side_by_side(tf.stack([t] * views, 1))
        return x, tf.nest.map_structure(repeat, y)

    return fetch_views


def check_augment(augment: Callable, fetch: Callable, num_rows: int) -> None:
    """Refuses an `augment` that is seen to mix rows, or to change more than features.

    Rows of other owners or examples in a view would have an influence that nobody clips. The
    derivative of one augmented row by another row tells, whatever is drawn at random; what
    goes through integers or Python is not seen.

    Args:
        augment: The function.
        fetch: Function from indices to `(x, y)`.
        num_rows: Int, the number of rows.

    Raises:
        SamplingError: If it returns another structure or number of rows, or an augmented row
            depends on another one.
    """
    count = min(_ROWS, num_rows)
    x, _ = fetch(tf.constant(np.linspace(0, num_rows - 1, count).astype(np.int64)))
    leaves = [t for t in tf.nest.flatten(x) if tf.convert_to_tensor(t).dtype.is_floating]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(leaves)
        seen = _augmented(augment, x)
        outputs = [tf.convert_to_tensor(t) for t in tf.nest.flatten(seen)]
        sums = [[tf.reduce_sum(t[i]) for t in outputs if t.dtype.is_floating] for i in range(count)]
    for i, of_row in enumerate(sums):
        gradients = [g for g in tape.gradient(of_row, leaves) if g is not None] if of_row else []
        for gradient in gradients:
            others = np.delete(tf.convert_to_tensor(gradient).numpy(), i, axis=0)
            if np.any(others[np.isfinite(others)] != 0):
                raise SamplingError(
                    "Argument `augment` mixes rows: one augmented row depends on another one, "
                    "whose influence would not be clipped. Received: "
                    f"augment={_name(augment)}. Make each view of its own row alone; mixup and "
                    "statistics of the batch (means over axis 0) have no place here."
                )


def _augmented(augment, x):
    seen = augment(x)
    try:
        tf.nest.assert_same_structure(x, seen)
    except (TypeError, ValueError):
        raise SamplingError(
            "Argument `augment` must return features in the structure of those it gets; targets "
            "are the same for all views. Received: a result of type "
            f"{type(seen).__name__} for features of type {type(x).__name__} from "
            f"augment={_name(augment)}."
        ) from None

    def same_rows(before, after):
        after = tf.convert_to_tensor(after)
        rows, known = tf.shape(before)[0], before.shape[0]
        if known is not None and after.shape.rank and after.shape[0] not in (None, known):
            raise SamplingError(
                "Argument `augment` must return as many rows as it gets. Received: "
                f"{after.shape[0]} for {known} from augment={_name(augment)}."
            )
        message = "`augment` must return as many rows as it gets."
        with tf.control_dependencies([tf.debugging.assert_equal(tf.shape(after)[0], rows, message)]
                                     if not tf.executing_eagerly() else []):  # fmt: skip
            return tf.identity(after)

    return tf.nest.map_structure(same_rows, x, seen)


def _side_by_side(stacked):
    """Makes `[rows, views, ...]` one batch axis, all views of a row before those of the next."""
    rows, views = stacked.shape[0], stacked.shape[1]
    shape = tf.concat([[tf.shape(stacked)[0] * views], tf.shape(stacked)[2:]], 0)
    rows = None if rows is None else rows * views
    return tf.ensure_shape(tf.reshape(stacked, shape), [rows, *stacked.shape[2:]])


def _name(function):
    return getattr(function, "__name__", None) or type(function).__name__
