# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Lines of progress, with the time that is left."""

import math
import time

# About how many seconds a quick cell takes on two cores of an AMD EPYC (Zen 4). Only their
# proportions matter: the time left follows from what the cells before took.
_USUAL = 20
_SECONDS = {
    "transformer": 30,
    "BertBackbone": 35,
    "RobertaBackbone": 35,
    "GPT2Backbone": 35,
    "GemmaBackbone": 35,
    "LlamaBackbone": 35,
    "ViTBackbone": 35,
    "inverted residual x 6": 40,
    "MobileNetV2": 70,
    "EfficientNetB0": 90,
    "ResNet50": 95,
    "ConvNeXtTiny": 120,
    "DenseNet121": 160,
}


def weight(cell):
    """Returns about how long a cell takes next to others, in seconds.

    Args:
        cell: Specification with the name of a model.
    """
    return _SECONDS.get(cell["model"], _USUAL)


def in_words(seconds):
    """Returns a time in words, such as `"7 min"` or `"40 s"`.

    Args:
        seconds: Float.
    """
    if seconds < 90:
        return f"{10 * math.ceil(seconds / 10)} s"
    return f"{math.ceil(seconds / 60)} min"


class Progress:
    """Counts what is done, and says how long the rest will take at this pace.

    Args:
        weights: List of floats, what each piece of work takes next to the others, in order.
        show: Function that is called with a line of text.
        clock: Function that returns seconds.
    """

    def __init__(self, weights, show, clock=time.monotonic):
        self._weights, self._show, self._clock = list(weights), show, clock
        self._done, self._start = 0, clock()

    def __call__(self, line):
        """Shows a line about the next piece of work, which is done."""
        self._done += 1
        done, rest = sum(self._weights[: self._done]), sum(self._weights[self._done :])
        elapsed = self._clock() - self._start
        left = f", {in_words(elapsed * rest / done)} left" if rest and done else ""
        self._show(f"[{self._done}/{len(self._weights)}{left}] {line}")
