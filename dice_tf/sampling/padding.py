# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of weight 0 that bring batches to few sizes, and draws that are padded so.

They are rows that were not drawn. A loop that loses their weight 0 still clips each of them,
and an example then enters a step once, where a copy of a drawn row would enter it twice.
"""

from collections.abc import Callable
import functools
import math

import numpy as np
from scipy import stats

from dice_tf.sampling.base import DRAW_STREAM, DrawPlan, Sampling

__all__ = ["padded_draws"]

# Chance that some draw of the planned run needs a padded size above the smallest one.
_OVERFLOW_PROBABILITY = 0.1
_SIZE_MULTIPLE = 8


def round_up(size, multiple):
    """Returns the smallest multiple, at least `multiple` itself, that holds `size`."""
    return multiple * max(1, math.ceil(size / multiple))


def with_others(drawn, num_examples, size, rng):
    """Returns the rows drawn, and then others that were not.

    Args:
        drawn: Int array, different numbers below `num_examples`.
        num_examples: Int >= 1.
        size: Int >= `len(drawn)`.
        rng: NumPy `Generator`.

    Returns:
        Int64 `[size]`. Numbers come twice only if there are fewer examples than rows.
    """
    others = rng.choice(num_examples, min(num_examples, size), replace=False)
    rows = np.append(drawn, np.setdiff1d(others, drawn, assume_unique=True))
    return np.resize(rows, size).astype(np.int64)


def weights(size, drawn, marks):
    """Returns the weights of a batch: 1 for rows drawn, then 0, the last `marks` of them -0.

    Args:
        size: Int, number of rows.
        drawn: Int, how many of them were drawn.
        marks: Int, at most `size - drawn`; see `dice_tf.ledger.provenance`.

    Returns:
        Float32 `[size]`.
    """
    values = np.zeros(size, dtype=np.float32)
    values[:drawn] = 1.0
    values[size - marks :] = -0.0
    return values


def padded_draws(
    sampling: Sampling, pick: Callable[..., np.ndarray], planned_steps: int, replicas: int
) -> DrawPlan:
    """Returns a `draw_plan` of groups that take turns, in batches of few sizes.

    Args:
        sampling: Whose draws they are. A member of the active group must be drawn with its
            `sampling_probability`; only padded sizes depend on that.
        pick: Function `pick(pool, rng, epoch, cycle)` that returns int indices below `pool`, the
            size of the active group, all different. `rng` is of this step, `epoch` names the pass
            over the data and the group, `cycle` counts the turns of the groups in it.
        planned_steps: As for `draw_plan`.
        replicas: As for `draw_plan`.

    Returns:
        `begin`, `draw` and `None`, as `draw_plan` returns them.
    """
    multiple, probability = math.lcm(_SIZE_MULTIPLE, replicas), sampling.sampling_probability

    @functools.cache
    def sizes(largest):
        quantile = stats.binom.isf(_OVERFLOW_PROBABILITY / planned_steps, largest, probability)
        smallest = round_up(int(quantile) + sampling.num_groups, multiple)
        return smallest, round_up(smallest // 4, multiple)

    def draw(iteration, step):
        *stream, offset = iteration.tolist()
        passes, step = divmod(int(step) + offset, sampling.steps_per_epoch)
        # Not taken before: a private checkpoint may bring other groups.
        group, groups = step % sampling.num_groups, sampling._groups()
        members = groups[group]
        pools = [sampling.num_examples if g is None else len(g) for g in groups]
        pool = pools[group]
        smallest, increment = sizes(max(pools))
        stream[-1] += passes
        sampling._state.note_draw(stream[-1] * sampling.steps_per_epoch + step)
        rng = sampling._generator(DRAW_STREAM, *stream, step)
        drawn = pick(pool, rng, (*stream, group), step // sampling.num_groups)
        excess = max(0, len(drawn) + sampling.num_groups - smallest)
        size = smallest + increment * -(-excess // increment)
        indices = drawn if members is None else members[drawn]
        indices = with_others(indices, sampling.num_examples, size, rng)
        shown = weights(size, len(drawn), marks=group + 1)
        if sampling.owners is None:
            return indices, shown
        return sampling.owners.rows_of(indices, shown, rng)

    return sampling._begin_iteration, draw, None
