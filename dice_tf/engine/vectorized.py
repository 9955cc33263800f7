# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Reference gradient engine: the whole model under `tf.vectorized_map`.

One gradient per clipped unit (an example, or a microbatch), materialised as a
`[units, parameters]` matrix: simple enough to be checked by reading, exact for any
model whose layers `tf.vectorized_map` can convert, and costly in memory.
"""

import keras
import tensorflow as tf

from dice_tf.engine import rematerialization
from dice_tf.engine.engine import split_by_group
from dice_tf.engine.gradient_sums import GradientSums
from dice_tf.engine.loss import call_in_training, per_example_losses
from dice_tf.engine.lost_gradients import refuse_lost
from dice_tf.engine.overrides import overridden
from dice_tf.engine.units import SINGLE_ROWS, by_unit, fill_last, row_shares
from dice_tf.errors import GradientEngineError
from dice_tf.mechanism import rounding


def weighted_gradient_sums(
    model, x, y, sample_weight, clip_weights, units=SINGLE_ROWS, *, groups=None
):
    r"""Returns \(\sum_i a_i g_i\) and \(\sum_i b_i g_i\) over the units of a batch.

    A unit is one example, or several rows whose mean gradient \(g_i\) is then weighted as a
    whole (see `Units`).

    Args:
        model: A built and compiled Keras model.
        x: Inputs, `[batch, ...]`.
        y: Targets, `[batch, ...]`.
        sample_weight: `None` or `[batch, ...]`.
        clip_weights: Function from norms, float32 `[units]`, to the weights \(a\) and
            \(b\) (or `None`), float32 `[units]`.
        units: `Units`, how rows make up units.
        groups: `None`, or the group of every trainable variable: norms and weights are then
            `[units, groups]`; see `dice_tf.engine.engine.Engine`.

    Returns:
        A `GradientSums`.

    Raises:
        GradientEngineError: If `tf.vectorized_map` cannot convert an operation of the
            model, or is known to be unsafe for it, or if a weight that the loss depends on
            has no gradient.

    Source: Zhang et al., ICLR 2024, Alg. 1 line 5; microbatches as in McMahan et al.,
    2018 (arXiv 1812.06210).
    """
    _refuse_unsafe_layers(model)
    variables = model.trainable_variables
    seed_states = _seed_states(model)
    batch = tf.shape(tf.nest.flatten(x)[0])[0]
    if sample_weight is None:
        sample_weight = tf.ones([batch])
    whole = x, y
    x, y, sample_weight = fill_last(x, y, sample_weight, units)
    shares = tf.ones([tf.shape(tf.nest.flatten(x)[0])[0]])
    if units.rows > 1:
        shares = row_shares(sample_weight, units)
    x, y, sample_weight, shares = tf.nest.map_structure(
        lambda t: by_unit(t, units.rows), (x, y, sample_weight, shares)
    )
    count = tf.shape(shares)[0]
    values = [tf.convert_to_tensor(v.value) for v in variables]
    connected = []
    structure = []

    def gradient_of_unit(inputs):
        (unit_x, unit_y, unit_weight, unit_shares), unit_seeds = inputs
        seeds = zip(seed_states, unit_seeds, strict=True)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(values)
            with keras.StatelessScope([*zip(variables, values, strict=True), *seeds]):
                y_pred = call_in_training(model, unit_x)
                losses = per_example_losses(model, unit_x, unit_y, y_pred, unit_weight)
            loss = tf.reduce_sum(losses * unit_shares)
        gradients = tape.gradient(loss, values)
        connected[:] = [g is not None for g in gradients]
        if not any(connected):
            refuse_lost(model, *whole, found=set())
            raise GradientEngineError(
                f"The loss of model '{model.name}' depends on none of its trainable variables."
            )
        structure[:] = [y_pred]
        flat = [
            tf.cast(tf.reshape(tf.convert_to_tensor(g), [-1]), tf.float32)
            for g in gradients
            if g is not None
        ]
        return tf.concat(flat, 0), losses, tf.nest.flatten(y_pred)

    inputs = (
        (x, y, sample_weight, shares),
        [_seeds_of_units(state, count) for state in seed_states],
    )
    try:
        with overridden(rematerialization.interceptions()):
            gradients, losses, outputs = tf.vectorized_map(
                gradient_of_unit,
                inputs,
                # Only random draws with a seed per unit need the loop; every other operation
                # that cannot be vectorized would be slow beyond use, so it is refused.
                fallback_to_while_loop=bool(seed_states),
            )
    except (ValueError, NotImplementedError) as error:
        if "No pfor vectorization" not in str(error) and "pfor" not in str(error):
            raise
        raise GradientEngineError(
            f"Model '{model.name}' has an operation that tf.vectorized_map cannot convert, so "
            "gradient_engine='vectorized' cannot be used for it. Use "
            f"gradient_engine='layerwise'. TensorFlow says: {error}"
        ) from error
    refuse_lost(
        model, *whole, {id(v._value) for v, c in zip(variables, connected, strict=True) if c}
    )
    _advance(seed_states)
    return _weigh(
        gradients, losses, outputs, connected, structure[0], variables, batch, clip_weights, groups
    )


def _weigh(
    gradients, losses, outputs, connected, structure, variables, batch, clip_weights, groups
):
    used = [v for v, c in zip(variables, connected, strict=True) if c]
    sizes = [v.shape.num_elements() for v in used]
    group_of = [0] * len(used)
    if groups is None:
        norms = tf.sqrt(rounding.sums_of_squares(gradients))
        finite = tf.math.is_finite(norms)
    else:
        group_of = [group for group, c in zip(groups, connected, strict=True) if c]
        norms = _norms_of_groups(tf.split(gradients, sizes, 1), group_of, max(groups) + 1)
        finite = tf.reduce_all(tf.math.is_finite(norms), 1)
    weights = [w for w in clip_weights(norms) if w is not None]
    by_group = split_by_group(norms, weights, groups)
    # 0 * inf is NaN: rows of weight 0 must be cleared before the product.
    gradients = tf.where(finite[:, None], gradients, 0.0)

    def weighted_sum(kind):
        product = lambda g, group: tf.linalg.matvec(g, by_group[group][1][kind], transpose_a=True)
        if groups is None:
            parts = iter(tf.split(product(gradients, 0), sizes))
        else:
            parts = map(product, tf.split(gradients, sizes, 1), group_of)
        return [
            tf.reshape(next(parts), v.shape) if c else None
            for v, c in zip(variables, connected, strict=True)
        ]

    merge = lambda t: tf.reshape(t, tf.concat([[-1], tf.shape(t)[2:]], 0))[:batch]
    return GradientSums(
        head=weighted_sum(0),
        residual=weighted_sum(1) if len(weights) > 1 else None,
        losses=merge(losses),
        y_pred=tf.nest.pack_sequence_as(structure, [merge(t) for t in outputs]),
        norms=norms,
    )


def _norms_of_groups(gradients, group_of, count):
    """Returns float32 `[units, groups]`, from the gradients of each variable, `[units, size]`."""
    squares = [[tf.zeros([tf.shape(gradients[0])[0]])] for _ in range(count)]
    for of_variable, group in zip(gradients, group_of, strict=True):
        squares[group].append(rounding.sums_of_squares(of_variable))
    return tf.sqrt(tf.stack([rounding.add_up(of_group) for of_group in squares], 1))


def _seed_states(model):
    states = {}
    for layer in model._flatten_layers():
        for generator in getattr(layer, "_seed_generators", ()):
            states[id(generator.state)] = generator.state
    return list(states.values())


def _seeds_of_units(state, units):
    # One seed for all units would give every example the same Dropout mask.
    seeds = tf.random.stateless_uniform(
        [units, 2], tf.cast(state.value, tf.int32), minval=0, maxval=2**31 - 1, dtype=tf.int32
    )
    return tf.cast(seeds, state.value.dtype)


def _advance(seed_states):
    for state in seed_states:
        state.assign(state + tf.constant([0, 1], state.dtype))


def _refuse_unsafe_layers(model):
    attention = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
    for layer in model._flatten_layers():
        if isinstance(layer, attention) and not model.jit_compile:
            raise GradientEngineError(
                f"Layer '{layer.path}' ({type(layer).__name__}) under tf.vectorized_map without "
                "XLA corrupts memory in TensorFlow's oneDNN kernels. Use "
                "gradient_engine='layerwise' or compile the model with jit_compile=True."
            )
        if isinstance(layer, keras.layers.RNN) and not layer.unroll:
            raise GradientEngineError(
                f"Layer '{layer.path}' ({type(layer).__name__}) loops over time steps, and "
                "tf.vectorized_map cannot convert the gradient of that loop. Use "
                "gradient_engine='layerwise', or build the layer with unroll=True."
            )
