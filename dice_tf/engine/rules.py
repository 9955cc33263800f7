# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Closed forms of per-example gradients, one rule per layer class.

A rule turns a `LayerCall` (inputs, and cotangents of the output) into contributions to
the layer's weights. It applies to exactly its class: a subclass may compute something
else, so it is differentiated example by example until it has a rule of its own.
"""

from collections.abc import Callable
import math
import sys
from typing import Any, NamedTuple

import keras
from keras.src.applications import convnext
import tensorflow as tf

from dice_tf.engine import rules_conv, rules_conv_recurrent, rules_normalisation, rules_recurrent
from dice_tf.engine.contributions import OuterProduct, PerExample, Rows
from dice_tf.errors import GradientEngineError

__all__ = ["register_rule"]


class _Rule(NamedTuple):
    contributions: Callable
    supports: Callable
    before_activation: bool
    run: Callable | None = None


_rules = {}


def register_rule(
    layer_class: type,
    rule: Callable[..., Any],
    *,
    supports: Callable[..., Any] | None = None,
    before_activation: bool = False,
) -> None:
    """Registers the closed form of a layer's per-example gradients.

    Args:
        layer_class: Subclass of `keras.layers.Layer`. The rule applies to this class
            only, not to classes derived from it.
        rule: Function from `(layer, call)` to a list of pairs of a Keras variable and a
            contribution (`PerExample`, `OuterProduct` or `Rows`). `call.inputs` is the
            first argument of the layer's call, `call.args` and `call.kwargs` are all of
            them, `call.cotangents` is the gradient of the summed loss with respect to
            the output; each example is one row of these tensors. Several pairs for the
            same variable add up; pairs for variables that are not trained are ignored.
        supports: Function from `(layer, inputs)` to a bool, evaluated before the layer
            runs. Where it is false, the layer is differentiated example by example.
        before_activation: Whether `call.cotangents` belong to the input of
            `layer.activation` instead of the output.

    Raises:
        GradientEngineError: If `layer_class` is not a layer class.

    Example: a learned position embedding, added to the inputs.

    >>> import keras
    >>> class AddPositions(keras.layers.Layer):
    ...     def build(self, shape):
    ...         self.positions = self.add_weight(shape=shape[1:])
    ...     def call(self, x):
    ...         return x + self.positions
    >>> register_rule(
    ...     AddPositions, lambda layer, call: [(layer.positions, PerExample(call.cotangents))])

    Source: Goodfellow, "Efficient per-example gradient computations", 2015 (the closed form
    of dense layers, which rules for other layers extend).
    """
    if not (isinstance(layer_class, type) and issubclass(layer_class, keras.layers.Layer)):
        raise GradientEngineError(
            "Argument `layer_class` must be a subclass of keras.layers.Layer. Received: "
            f"layer_class={layer_class!r}."
        )
    _rules[layer_class] = _Rule(rule, supports or (lambda layer, inputs: True), before_activation)


def rule_of(layer_class):
    """Returns the rule of a class, or `None`."""
    if layer_class.__module__.startswith("keras_hub."):
        # Not above, because importing dice_tf must not import keras-hub.
        layers = sys.modules["keras_hub"].layers
        _rules.setdefault(layers.ReversibleEmbedding, _rules[keras.layers.ReversibleEmbedding])
        _rules.setdefault(layers.PositionEmbedding, _Rule(_positions, _is_sequence, False))
    return _rules.get(layer_class)


def wants_activation_input(layer):
    """Whether the rule of a layer's class needs the input of its activation."""
    rule = rule_of(type(layer))
    return rule is not None and rule.before_activation and rule.run is None


def rule_for(layer, function, args, kwargs):
    """Returns the rule that describes a call, or `None`.

    Args:
        layer: Keras layer.
        function: The bound method that will run; a rule describes only that of the class.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
    """
    rule = rule_of(type(layer))
    if rule is None or getattr(function, "__func__", None) is not type(layer).call:
        return None
    inputs = args[0] if args else next(iter(kwargs.values()), None)
    if not tf.is_tensor(inputs) or not isinstance(inputs, tf.Tensor):
        return None
    return rule if rule.supports(layer, inputs) else None


def bias_gradients(cotangents, shape):
    """Returns per-example gradients of a weight that is added to the output.

    Args:
        cotangents: `[batch, ...]` of the output.
        shape: Shape of the weight, which is broadcast from the right.
    """
    rank = cotangents.shape.rank
    kept = {rank - 1 - i for i, size in enumerate(reversed(shape)) if size != 1}
    axes = [axis for axis in range(1, rank) if axis not in kept]
    cotangents = tf.cast(cotangents, tf.float32)
    gradients = tf.reduce_sum(cotangents, axes) if axes else cotangents
    if gradients.shape[1:].as_list() == list(shape):
        return gradients
    return tf.reshape(gradients, [-1, *shape])


def _with_bias(layer, cotangents, contributions):
    if layer.bias is not None:
        gradients = bias_gradients(cotangents, tuple(layer.bias.shape))
        contributions.append((layer.bias, PerExample(gradients)))
    return contributions


def _dense(layer, call):
    # [batch, ..., k] and [batch, ..., f]: every axis in between is a position.
    inputs = _positions_by_features(call.inputs)
    cotangents = _positions_by_features(call.cotangents)
    if not layer.lora_enabled:
        kernel = [(layer._kernel, OuterProduct(inputs, cotangents, shape=layer._kernel.shape))]
        return _with_bias(layer, call.cotangents, kernel)
    # kernel + scale * a @ b: two thin products, never the kernel's own gradient.
    a, b = (tf.convert_to_tensor(v._value) for v in (layer.lora_kernel_a, layer.lora_kernel_b))
    scale = layer.lora_alpha / layer.lora_rank
    inputs, cotangents = tf.cast(inputs, tf.float32), tf.cast(cotangents, tf.float32)
    low_rank = [
        (layer.lora_kernel_a, OuterProduct(
            inputs, scale * tf.matmul(cotangents, b, transpose_b=True), shape=a.shape)),
        (layer.lora_kernel_b, OuterProduct(
            scale * tf.matmul(inputs, a), cotangents, shape=b.shape)),
    ]  # fmt: skip
    return _with_bias(layer, call.cotangents, low_rank)


def _positions_by_features(tensor):
    if tensor.shape.rank == 2:
        return tensor[:, None, :]
    positions = tensor.shape[1:-1]
    positions = math.prod(positions) if positions.is_fully_defined() else None
    if tensor.shape.rank == 3:
        return tensor
    count = tf.reduce_prod(tf.shape(tensor)[1:-1]) if positions is None else positions
    return tf.reshape(tensor, [-1, count, tensor.shape[-1]])


class _Equation(NamedTuple):
    """Letters of an einsum, by their part in the gradient of its second operand."""

    batch: str
    groups: str
    positions: str
    inputs: str
    outputs: str
    operand: str
    kernel: str
    result: str


def _parse_equation(equation, rank):
    """Returns the `_Equation` of `operand,kernel->result`, or `None` if it has no closed form."""
    operands, result = equation.replace(" ", "").split("->")
    operand, kernel = operands.split(",")
    letters = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation]
    hidden = "".join(letters[: rank - len(operand.replace("...", ""))])
    operand, result = operand.replace("...", hidden), result.replace("...", hidden)
    distinct = all(len(set(part)) == len(part) for part in (operand, kernel, result))
    if not distinct or "." in kernel or not result or operand[0] != result[0]:
        return None
    batch = result[0]
    groups = "".join(c for c in kernel if c in operand and c in result)
    inputs = "".join(c for c in kernel if c in operand and c not in result)
    outputs = "".join(c for c in kernel if c in result and c not in operand)
    positions = "".join(c for c in operand if c in result and c not in kernel and c != batch)
    covered = set(operand) | set(result) == set(batch + groups + positions + inputs + outputs)
    if batch in kernel or not covered or len(kernel) != len(groups + inputs + outputs):
        return None
    if set(operand) - set(result) != set(inputs) or set(result) - set(operand) != set(outputs):
        return None
    return _Equation(batch, groups, positions, inputs, outputs, operand, kernel, result)


def _einsum_product(eq, inputs, cotangents, shape):
    """Per-example gradients of the kernel of an einsum, as an outer product."""
    sizes = dict(zip(eq.kernel, shape, strict=True))
    count = lambda letters: math.prod(sizes[c] for c in letters)
    groups = [count(eq.groups)] if eq.groups else []
    inputs = _arranged(inputs, eq.operand, eq, eq.inputs, groups, count(eq.inputs))
    cotangents = _arranged(cotangents, eq.result, eq, eq.outputs, groups, count(eq.outputs))
    order = eq.groups + eq.inputs + eq.outputs
    layout = (tuple(sizes[c] for c in order), tuple(order.index(c) for c in eq.kernel))
    layout = None if order == eq.kernel else layout
    return OuterProduct(inputs, cotangents, shape=shape, layout=layout)


def _arranged(tensor, letters, eq, features, groups, size):
    """Brings a tensor to `[batch, (groups,) positions, features]`."""
    order = [letters.index(c) for c in eq.batch + eq.groups + eq.positions + features]
    if order != sorted(order):
        tensor = tf.transpose(tensor, order)
    first = 1 + len(eq.groups)
    positions: Any = tensor.shape[first : first + len(eq.positions)]
    if positions.is_fully_defined():
        positions = math.prod(positions)
    else:
        positions = tf.reduce_prod(tf.shape(tensor)[first : first + len(eq.positions)])
    return tf.reshape(tensor, [-1, *groups, positions, size])


def _einsum_equation(layer, inputs):
    return _parse_equation(layer.equation, inputs.shape.rank)


def _supports_einsum(layer, inputs):
    eq = _einsum_equation(layer, inputs)
    return eq is not None and (not layer.lora_enabled or eq.kernel[-1] in eq.outputs)


def _einsum_dense(layer, call):
    eq = _einsum_equation(layer, call.inputs)
    if not layer.lora_enabled:
        product = _einsum_product(eq, call.inputs, call.cotangents, tuple(layer._kernel.shape))
        return _with_bias(layer, call.cotangents, [(layer._kernel, product)])
    # The kernel is contracted from a and b over a rank letter, on its last axis.
    rank, last = "r" if "r" not in layer.equation else "q", eq.kernel[-1]
    if rank in eq.operand + eq.kernel + eq.result:
        rank = next(c for c in "abcdefghijklmnop" if c not in eq.operand + eq.kernel + eq.result)
    through_rank = lambda letters: letters.replace(last, rank)
    a, b = (tf.convert_to_tensor(v._value) for v in (layer.lora_kernel_a, layer.lora_kernel_b))
    scale = layer.lora_alpha / layer.lora_rank
    inputs = tf.cast(call.inputs, tf.float32)
    cotangents = tf.cast(call.cotangents, tf.float32)
    narrow = through_rank(eq.result)
    below = tf.einsum(f"{eq.result},{rank}{last}->{narrow}", cotangents, scale * b)
    above = tf.einsum(f"{eq.operand},{through_rank(eq.kernel)}->{narrow}", inputs, scale * a)
    of_a = _parse_equation(f"{eq.operand},{through_rank(eq.kernel)}->{narrow}", len(eq.operand))
    of_b = _parse_equation(f"{narrow},{rank}{last}->{eq.result}", len(narrow))
    return _with_bias(
        layer,
        call.cotangents,
        [
            (layer.lora_kernel_a, _einsum_product(of_a, inputs, below, tuple(a.shape))),
            (layer.lora_kernel_b, _einsum_product(of_b, above, cotangents, tuple(b.shape))),
        ],
    )


def _ids_and_rows(layer, call):
    ids = call.inputs
    ids = ids if ids.dtype in (tf.int32, tf.int64) else tf.cast(ids, tf.int32)
    positions = ids.shape[1:].num_elements() if ids.shape[1:].is_fully_defined() else None
    count = tf.reduce_prod(tf.shape(ids)[1:]) if positions is None else positions
    ids = _from_the_end(tf.reshape(ids, [-1, count]), layer.input_dim)
    return ids, tf.reshape(call.cotangents, [-1, count, layer.output_dim])


def _from_the_end(ids, rows):
    """Counts negative ids from the last row, as `keras.ops.take` does."""
    return tf.where(ids < 0, ids + tf.cast(rows, ids.dtype), ids)


def _embedding(layer, call):
    ids, cotangents = _ids_and_rows(layer, call)
    if not layer.lora_enabled:
        return [(layer._embeddings, Rows(ids, cotangents, shape=layer._embeddings.shape))]
    a, b = layer.lora_embeddings_a, layer.lora_embeddings_b
    scale = layer.lora_alpha / layer.lora_rank
    cotangents = tf.cast(cotangents, tf.float32)
    below = scale * tf.matmul(cotangents, tf.convert_to_tensor(b._value), transpose_b=True)
    above = scale * tf.gather(tf.convert_to_tensor(a._value), ids)
    return [
        (a, Rows(ids, below, shape=a.shape)),
        (b, OuterProduct(above, cotangents, shape=b.shape)),
    ]


def _supports_reversible(layer, inputs):
    del inputs
    return not layer.lora_enabled and getattr(layer, "logit_soft_cap", None) is None


def _reversible_embedding(layer, call):
    reverse = call.kwargs.get("reverse", call.args[1] if len(call.args) > 1 else False)
    if not reverse:
        return _embedding(layer, call)
    hidden = _positions_by_features(call.inputs)
    logits = _positions_by_features(call.cotangents)
    if layer.tie_weights:
        return [(layer._embeddings, OuterProduct(logits, hidden, shape=layer._embeddings.shape))]
    kernel = layer.reverse_embeddings
    return [(kernel, OuterProduct(hidden, logits, shape=kernel.shape))]


def _positions(layer, call):
    """Rows of keras-hub's PositionEmbedding, which adds row t at position t."""
    given = dict(zip(("inputs", "start_index", "positions"), call.args, strict=False))
    given.update(call.kwargs)
    shape, ids = tf.shape(call.cotangents)[:2], given.get("positions")
    ids = given.get("start_index", 0) + tf.range(shape[1]) if ids is None else ids
    table = layer.position_embeddings
    ids = _from_the_end(tf.broadcast_to(ids, shape), table.shape[0])
    return [(table, Rows(ids, call.cotangents, shape=table.shape))]


def _is_sequence(layer, inputs):
    del layer
    return inputs.shape.rank == 3


def _has_known_features(layer, inputs):
    del layer
    return inputs.shape.rank is not None and inputs.shape.rank > 1


register_rule(keras.layers.Dense, _dense, supports=_has_known_features, before_activation=True)
register_rule(
    keras.layers.EinsumDense, _einsum_dense, supports=_supports_einsum, before_activation=True
)
register_rule(keras.layers.Embedding, _embedding)
for _class in (
    keras.layers.LayerNormalization,
    keras.layers.RMSNormalization,
    keras.layers.GroupNormalization,
):
    register_rule(_class, rules_normalisation.contributions, supports=rules_normalisation.supports)
register_rule(
    convnext.LayerScale,
    rules_normalisation.scaled,
    supports=rules_normalisation.supports_scaled,
)
register_rule(
    keras.layers.ReversibleEmbedding, _reversible_embedding, supports=_supports_reversible
)
for _class in (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D):
    register_rule(
        _class, rules_conv.convolution, supports=rules_conv.supports, before_activation=True
    )
for _class in (keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D):
    register_rule(
        _class, rules_conv.depthwise, supports=rules_conv.supports_depthwise,
        before_activation=True,
    )  # fmt: skip
for _class in (keras.layers.SeparableConv1D, keras.layers.SeparableConv2D):
    register_rule(
        _class, rules_conv.separable, supports=rules_conv.supports_depthwise,
        before_activation=True,
    )  # fmt: skip
for _class in (keras.layers.SimpleRNN, keras.layers.LSTM, keras.layers.GRU):
    # What is watched here is not the input of an activation, but is used in the same way.
    _rules[_class] = _Rule(
        rules_recurrent.contributions, rules_recurrent.supports, True, rules_recurrent.run
    )
for _class in (keras.layers.ConvLSTM1D, keras.layers.ConvLSTM2D, keras.layers.ConvLSTM3D):
    _rules[_class] = _Rule(
        rules_conv_recurrent.contributions,
        rules_conv_recurrent.supports,
        True,
        rules_conv_recurrent.run,
    )
