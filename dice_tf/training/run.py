# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`Run`: what this process knows of one model, besides what the model and its optimizer hold.

Keras has no place for it: attributes of a model are tracked and saved, and a copy would have
them, too.
"""

import dataclasses
from typing import Any
import weakref

from dice_tf.errors import PlainGradientsError
from dice_tf.mechanism import DiceMechanism


@dataclasses.dataclass
class Checks:
    """What was checked of a model; it holds while its parts and settings stay the same.

    Attributes:
        parts: Weak references to loss, variables and layers.
        settings: What else the checks depend on.
        forward_bytes: Int, the bytes of one row in a forward pass.
        compared: Whether gradients were compared with those of single examples.
        batches_tried: Int, batches that had nothing to compare.
        with_gradients: List that says of each variable whether the last step moved it.
    """

    parts: list
    settings: tuple
    forward_bytes: int
    compared: bool = False
    batches_tried: int = 0
    with_gradients: list | None = None


@dataclasses.dataclass
class Run:
    """What this process knows of one model.

    Attributes:
        checks: `Checks`, or `None` before the first batch.
        steps_others: Whether its `train_step` takes private steps of other models only.
        traced_for: The private optimizer (a weak reference) whose steps its train function takes,
            and how often this one was built by then; `None` before the first `fit`.
        trained_by: Weak reference to the private optimizer of its last `fit`, or `None`.
        steps: Int, the steps that this one had made.
        talks: Whether it is in a `fit` that may print.
    """

    checks: Checks | None = None
    steps_others: bool = False
    traced_for: tuple | None = None
    trained_by: Any = None
    steps: int = 0
    talks: bool = False

    def needs_comparison(self, optimizer):
        """Whether gradients are still to be compared, and `optimizer` asks for it."""
        settled = self.steps_others or (self.checks is not None and self.checks.compared)
        return optimizer.self_check and not settled


_runs = weakref.WeakKeyDictionary()


def run_of(model):
    """Returns the one `Run` of a model."""
    return _runs.setdefault(model, Run())


def is_private(optimizer):
    """Whether `optimizer` is one of this package's."""
    return isinstance(getattr(optimizer, "mechanism", None), DiceMechanism)


def has_private_optimizer(model):
    """Whether a model was compiled with an optimizer of this package."""
    return is_private(getattr(model, "optimizer", None))


def private_optimizer(model, need):
    """Returns the optimizer of a model.

    Args:
        model: A Keras model.
        need: String that says what there is none of without a private optimizer.

    Raises:
        PlainGradientsError: If it is not private.
    """
    if not has_private_optimizer(model):
        raise PlainGradientsError(
            f"Without a private optimizer there is no {need}. Received: "
            f"optimizer={type(getattr(model, 'optimizer', None)).__name__}. Compile the model with "
            "DiceSGDOptimizer or another optimizer of dice_tf."
        )
    return model.optimizer
