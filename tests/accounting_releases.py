# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""How far an epsilon may lie from the one in the docs, with another release of dp_accounting.

The docs' numbers are those of dp_accounting before 0.5. Since then, fractional Renyi orders whose
series needs more than 1000 terms are left out: a bound as true as before, and up to 4 % larger in
the settings of the docs.
"""

import importlib.metadata

_release = tuple(int(part) for part in importlib.metadata.version("dp-accounting").split(".")[:2])
LARGEST_RATIO = 1.04 if _release >= (0, 5) else 1.0


def agrees(stated, epsilon):
    """Returns whether `epsilon`, as the docs round it, is the number stated there."""
    if stated in (f"{epsilon:.2f}", f"{epsilon:.1e}"):
        return True
    return 1.0 < epsilon / float(stated) <= LARGEST_RATIO


def same_table(stated, printed):
    """Returns whether the lines of two tables agree, number by number in their cells."""

    def same_cell(one, other):
        try:
            return one == other or agrees(one, float(other))
        except ValueError:
            return False

    rows = [[line.split("|") for line in lines] for lines in (stated, printed)]
    return [len(row) for row in rows[0]] == [len(row) for row in rows[1]] and all(
        same_cell(one.strip(), other.strip()) for lines in zip(*rows) for one, other in zip(*lines)
    )
