# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`PerLayerClipping`: every layer is clipped to thresholds of its own."""

import collections
from collections.abc import Mapping
import dataclasses
import math
from typing import Any, ClassVar

from dice_tf.checks.arguments import check_number
from dice_tf.errors import MechanismError
from dice_tf.mechanism.clipping import Clip, VariableGroups

__all__ = ["PerLayerClipping"]

# An error message has room for so many names of layers.
_NAMES_SHOWN = 6


@dataclasses.dataclass(frozen=True, repr=False)
class PerLayerClipping(Clip):
    r"""Thresholds per layer, `clipping="per_layer"`: a long layer does not shorten the others.

    With \(g_{i,l}\), the part of a gradient that belongs to the variables of layer \(l\), and
    its share \(p_l\) of both thresholds, \(\sum_l p_l^2 = 1\):

    \[h_{i,l} = \mathrm{clip}(g_{i,l}, p_l C_1), \qquad
      r_{i,l} = \mathrm{clip}(g_{i,l} - h_{i,l}, p_l C_2).\]

    `l2_norm_clip` and `error_norm_clip` are still the thresholds of the whole, \(C_1\) and
    \(C_2\). **Epsilon, noise and calibration are those of flat clipping:** the head of an
    example is at most \((\sum_l p_l^2 C_1^2)^{1/2} = C_1\) long, its residual
    \((\sum_l p_l^2 C_2^2)^{1/2} = C_2\). That is all that the proofs of `docs/privacy.md` know
    of clipping. In particular one entry of an example moves a window of releases by at most
    \((\sum_l p_l^2 C_1^2 + p_l^2 C_2^2 / s)^{1/2} = (C_1^2 + C_2^2 / s)^{1/2}\), and where it
    may meet its own residual, one release by \(C_1 + C_2\). Every coordinate gets the same noise.

    A layer here is what owns variables: kernel and bias of a `Dense` go together, a
    `MultiHeadAttention` has a layer for each projection, a layer that is used several times is
    one. Layers without trainable variables do not count.

    Args:
        proportions: Mapping from the name of each layer to a float > 0, or `None` for equal
            shares \(p_l = 1/\sqrt{L}\). With weights \(q_l\), \(p_l = q_l / \lVert q \rVert\).
            In a nested model the name is preceded by those of what it is in, as in
            `"encoder/dense"`. Proportions are public: do not compute them from private data.

    Raises:
        MechanismError: If a proportion is not above 0; before the first step, if names do not
            match the layers of the model; with `bound_residuals=False`.

    Example:

    >>> import keras
    >>> model = keras.Sequential([
    ...     keras.Input((4,)), keras.layers.Dense(8, name="hidden"),
    ...     keras.layers.Dense(1, name="output")])
    >>> PerLayerClipping({"hidden": 4.0, "output": 3.0}).groups(model)
    VariableGroups(of_variables=(0, 0, 1, 1), shares=(0.8, 0.6))

    Source: McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR
    2018 (arXiv 1710.06963), per-layer clipping; with error feedback, `docs/privacy.md`.
    """

    proportions: Any = None

    name: ClassVar[str] = "per_layer"
    # Their error would be clipped as a whole.
    residuals_of: ClassVar[str | None] = "layer"

    def __post_init__(self) -> None:
        given = self.proportions
        if given is None:
            return
        if not isinstance(given, Mapping) or not given:
            raise MechanismError(
                "Argument `proportions` must be a mapping from names of layers to numbers above 0, "
                f"or None for equal shares. Received: proportions={given!r}."
            )
        weights = {str(name): check_number(f"proportions[{name!r}]", given[name]) for name in given}
        # Sorted pairs, so that equal rules have one hash and one `repr`, which names the
        # mechanism in records of runs.
        object.__setattr__(self, "proportions", tuple(sorted(weights.items())))

    def __repr__(self) -> str:
        return f"PerLayerClipping({self.get_config()['proportions']})"

    def groups(self, model: Any) -> VariableGroups:
        """Returns one group per layer that has trainable variables, in the model's order.

        Args:
            model: A built Keras model.

        Raises:
            MechanismError: If `proportions` names a layer that the model does not have, leaves
                out one that is trained, or means several by one name.
        """
        owners, found = _owners(model), _owners_of_trained(model)
        numbers = {owner: number for number, owner in enumerate(dict.fromkeys(found))}
        weights = [1.0] * len(numbers)
        if self.proportions is not None:
            names, given = [name for name, _ in numbers], dict(self.proportions)
            _check_names(names, {name for name, _ in owners.values()}, given)
            weights = [given[name] for name in names]
        total = math.hypot(*weights)
        return VariableGroups(
            of_variables=tuple(numbers[owner] for owner in found),
            shares=tuple(weight / total for weight in weights),
        )

    def statement(self) -> str:
        """Returns how the thresholds are shared out."""
        shares = "equal shares" if self.proportions is None else "shares in given proportions"
        return (
            f"Every layer is clipped to thresholds of its own, {shares} of C1 and C2 whose squares "
            "add up to 1. So all layers together are at most C1 and C2 long, as with one "
            "threshold for the whole gradient."
        )

    def get_config(self) -> dict[str, Any]:
        """Returns the proportions as a dict."""
        return {"proportions": None if self.proportions is None else dict(self.proportions)}


def group_names(model: Any) -> list[str]:
    """Returns the names of the layers that are clipped by themselves, in the order of groups.

    Args:
        model: A built Keras model. Layers of one name are told apart by a number.
    """
    names: list[str] = []
    for name, _ in dict.fromkeys(_owners_of_trained(model)):
        same = sum(known.partition(" #")[0] == name for known in names)
        names.append(name if same == 0 else f"{name} #{same + 1}")
    return names


def _owners_of_trained(model):
    """Returns `(name, number)` of the layer that owns each trainable variable, in order."""
    owners = _owners(model)
    return [owners.get(id(v._value), (v.path, id(v._value))) for v in model.trainable_variables]


def _owners(model):
    """Returns `{id: (name, number)}`: the layer that owns each variable, trained or not.

    Not `layer.path`, which is another one after a nested model was saved and loaded.
    """
    owners, seen = {}, set()
    # Breadth first: a layer that is reached in several ways has the shortest name.
    waiting = collections.deque([(model.name, "", model)])
    while waiting:
        name, prefix, layer = waiting.popleft()
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        for variable in layer._trainable_variables:
            owners.setdefault(id(variable._value), (name, id(layer)))
        for inner in layer._layers:
            path = prefix + inner.name
            waiting.append((path, f"{path}/", inner))
    return owners


def _check_names(names, known, given):
    """Refuses proportions whose names do not match the layers of a model.

    Args:
        names: List of the names of layers that are trained.
        known: Set of the names of all layers that own variables.
        given: Dict of the proportions.
    """
    problems = {
        "unknown layers": [name for name in given if name not in known],
        "layers left out": [name for name in dict.fromkeys(names) if name not in given],
        "several layers of one name": [name for name in given if names.count(name) > 1],
    }
    found = [f"{what} {_some(those)}" for what, those in problems.items() if those]
    if found:
        raise MechanismError(
            "Argument `proportions` of PerLayerClipping must name every layer that has trainable "
            f"variables, once. Received: {'; '.join(found)}. The layers are {_some(names)}. "
            "Rename layers (`name=`), or leave `proportions` out for equal shares."
        )


def _some(names):
    more = len(names) - _NAMES_SHOWN
    return f"{names[:_NAMES_SHOWN]}" + (f" and {more} more" if more > 0 else "")
