# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a statement says of thresholds and noise that change from step to step."""

from collections.abc import Mapping
import math

from dice_tf.mechanism import DiceMechanism


def parameters(mechanism: DiceMechanism, thresholds: Mapping[str, float] | None) -> dict[str, str]:
    """Returns rows for the statement.

    Args:
        mechanism: The run's `DiceMechanism`.
        thresholds: Dict from the name of a layer, or `"all"`, to its threshold C1, or `None`.
    """
    rows: dict[str, str] = {}
    if thresholds is not None:
        rows["C1 after the last step"] = f"{math.hypot(*thresholds.values()):.6g}"
        if len(thresholds) > 1:
            rows.update({f"  of {name}": f"{value:.6g}" for name, value in thresholds.items()})
    if math.isfinite(mechanism.count_noise_multiplier):
        rows["noise multiplier of counts"] = f"{mechanism.count_noise_multiplier:g}"
    schedule = mechanism.schedule
    if schedule is not None:
        listed = lambda values: ", ".join(f"{value:g}" for value in values)
        rows["pieces begin at steps"] = listed((0, *schedule.boundaries))
        rows["factors of noise"] = listed(schedule.noise_factors)
        rows["factors of thresholds"] = listed(schedule.clip_factors)
    return rows


def notes(mechanism: DiceMechanism) -> list[str]:
    """Returns sentences for the statement: how what changes is accounted.

    Args:
        mechanism: The run's `DiceMechanism`.
    """
    found = []
    if mechanism.moves and mechanism.error_norm_clip > 0:
        found.append(
            "When thresholds fall, stored residuals are scaled down with them: measured by the "
            "noise of each step, no example moves a release by more than with constant thresholds."
        )
    if mechanism.schedule is not None:
        found.append(
            "Noise and thresholds change at steps that were fixed beforehand. Each round is "
            "accounted at the smallest noise that an example's head and residuals can meet in it."
        )
    return found
