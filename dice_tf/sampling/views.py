# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Several views of each row, drawn afresh: augmentation multiplicity."""

from collections.abc import Callable
from typing import Any
import warnings

import numpy as np
import tensorflow as tf

from dice_tf.checks.arguments import check_integer
from dice_tf.errors import SamplingError, UncheckedGradientsWarning

# So many rows are looked at before the first batch, and so often: a shuffle that mixes them is
# missed with a probability of 1e-5.
_ROWS, _TRIES = 8, 3


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

    Rows of other owners or examples in a view would have an influence that nobody clips. NaN
    in some rows tells, whatever is drawn at random: it spreads to all that depends on them.
    What goes through integers is not seen.

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
    _augmented(augment, x)
    numbers = tf.nest.map_structure(_as_floats, x)
    try:
        before = _is_broken(_augmented(augment, numbers))
    except Exception as error:  # Of a function that takes only what it is to get.
        warnings.warn(
            "Whether `augment` keeps rows apart could not be seen, because it fails on features "
            f"as floats ({type(error).__name__}). Received: augment={_name(augment)}. If a view "
            "depends on other rows, epsilon is void: make each view of its own row alone.",
            UncheckedGradientsWarning,
            stacklevel=3,
        )
        return
    broken = np.arange(count) >= count // 2
    poison = lambda t: t if not t.dtype.is_floating else _with_nan(t, broken)
    for _ in range(_TRIES):
        after = _is_broken(_augmented(augment, tf.nest.map_structure(poison, numbers)))
        if np.any(after & ~before & ~broken):
            raise SamplingError(
                "Argument `augment` mixes rows: one augmented row depends on another one, whose "
                f"influence would not be clipped. Received: augment={_name(augment)}. Make each "
                "view of its own row alone; mixup and statistics of the batch (means over axis 0) "
                "have no place here."
            )


def _as_floats(tensor):
    tensor = tf.convert_to_tensor(tensor)
    return tf.cast(tensor, tf.float32) if tensor.dtype.is_integer else tensor


def _with_nan(tensor, rows):
    rows = tf.reshape(tf.constant(rows), [-1] + [1] * (tensor.shape.rank - 1))
    return tf.where(rows, tf.constant(np.nan, tensor.dtype), tensor)


def _is_broken(features):
    """Which rows of augmented features hold a number that is none."""
    floats = [t for t in map(tf.convert_to_tensor, tf.nest.flatten(features))
              if t.dtype.is_floating]  # fmt: skip
    rows = [np.isnan(t.numpy().reshape(len(t), -1)).any(1) for t in floats]
    return np.any(rows, axis=0) if rows else np.zeros(1, bool)


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
