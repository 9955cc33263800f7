# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""The fast gradient engine: layer by layer, without per-example copies of weights.

One forward pass records what every layer saw; one backward pass gives the cotangents of
what every layer returned. For most layers a per-example gradient is a product of the
two, so its norm and the weighted sums of all of them follow without writing any of them
down ("ghost norms" and "book-keeping"). Layers without a closed form are differentiated
one by one under `tf.vectorized_map`. What no layer call accounts for is refused.
"""

import copy
import functools
import itertools
from typing import Any

import tensorflow as tf

from dice_tf.engine import gram, local_gradients
from dice_tf.engine.contributions import OuterProduct, Pooled
from dice_tf.engine.engine import split_by_group
from dice_tf.engine.gradient_sums import GradientSums
from dice_tf.engine.loss import call_in_training, per_example_losses
from dice_tf.engine.lost_gradients import refuse_lost
from dice_tf.engine.merging import merged, small_matrices
from dice_tf.engine.recording import Recorder
from dice_tf.engine.residual_rows import heads_and_residuals, residual_rows
from dice_tf.engine.units import SINGLE_ROWS, fill_last, in_units, row_shares
from dice_tf.errors import GradientEngineError
from dice_tf.mechanism import rounding

# Norms below the smallest threshold. What squares may have lost to underflow is counted, so
# that without this padding would have a norm, too.
_NOTHING = 5e-13


@tf.autograph.experimental.do_not_convert
def weighted_gradient_sums(
    model, x, y, sample_weight, clip_weights, units=SINGLE_ROWS, *, groups=None
):
    r"""Returns \(\sum_i a_i g_i\) and \(\sum_i b_i g_i\) over the units of a batch.

    A unit is one example, or several rows whose mean gradient \(g_i\) is weighted as a whole.

    Args:
        model: A compiled Keras model.
        x: Inputs, `[batch, ...]`.
        y: Targets, `[batch, ...]`.
        sample_weight: `None` or `[batch, ...]`.
        clip_weights: Function from norms, float32 `[units]`, to the weights \(a\) and
            \(b\) (or `None`), float32 `[units]`, 0 where a norm is not finite.
        units: `Units`, how rows make up units.
        groups: `None`, or the group of every trainable variable: norms and weights are then
            `[units, groups]`; see `dice_tf.engine.engine.Engine`.

    Returns:
        A `GradientSums`. Sums are `None` for variables that the loss does not reach.

    Raises:
        GradientEngineError: If a trainable weight is used where no layer call accounts
            for it, or none is seen, a layer is called without the batch axis at the top of
            the model, or a layer cannot be recomputed for one example.
        LossError: If the loss has no value per example.

    Source: Zhang et al., ICLR 2024, Alg. 1 line 5. Norms from Gram matrices: Goodfellow,
    2015 (arXiv 1510.01799); sums from recorded inputs and cotangents: Bu et al., 2023
    (arXiv 2210.00038).
    """
    if not all(layer.built for layer in model._flatten_layers()):
        call_in_training(model, x)
    rows_given = tf.shape(tf.nest.flatten(x)[0])[0]
    if units.rows > 1:
        sample_weight = tf.ones([rows_given]) if sample_weight is None else sample_weight
        x, y, sample_weight = fill_last(x, y, sample_weight, units)
    first = tf.nest.flatten(x)[0]
    static_batch, batch = first.shape[0], tf.shape(first)[0]
    x = tf.nest.map_structure(_with_unknown_batch, x)
    marker = tf.nest.flatten(x)[0].shape[0]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        with Recorder(model, tape, marker, x) as recorder:
            y_pred = call_in_training(model, x)
            losses = per_example_losses(model, x, y, y_pred, sample_weight)
        shares = 1.0 if units.rows == 1 else row_shares(sample_weight, units)
        total = tf.reduce_sum(losses * shares)
    calls = recorder.finished_calls()
    _pull_back(tape, total, calls)
    calls = [call for call in calls if call.cotangents is not None]
    contributions = _by_variable(calls, marker)
    refuse_lost(model, x, y, found=set(contributions))
    group_of: dict[Any, int] = dict.fromkeys(contributions, 0)
    if groups is not None:
        pairs = zip(model.trainable_variables, groups, strict=True)
        group_of = {id(variable._value): group for variable, group in pairs}
    static_count = None if static_batch is None else static_batch // units.rows
    count = batch // units.rows
    # One list for each group of variables.
    squares = [[tf.zeros([count])] for _ in range(1 if groups is None else max(groups) + 1)]
    parts = {}
    checked = functools.partial(tf.control_dependencies, _batch_axis_checks(calls, batch))
    small, matrices = [{} for _ in squares], [[] for _ in squares]
    for key, (_, listed) in contributions.items():
        if units.rows == 1 and len(listed) == 1 and not Pooled.takes(listed):
            # At once, while cotangents of other layers do not exist yet. Nothing that is
            # computed from a wrong batch axis goes any further.
            of_small = small_matrices(listed[0], static_count)
            if of_small is not None:
                matrices[group_of[key]].append(of_small)
                parts[key] = listed
                continue
            of_variable, parts[key] = merged(listed, static_count)
            with checked():
                # XLA drops assertions, but there this fails if the batch axis is another.
                squares[group_of[key]].append(tf.reshape(of_variable, [count]))
            continue
        with checked():
            listed = [in_units(contribution, units.rows) for contribution in listed]
            if Pooled.takes(listed):
                small[group_of[key]][key] = listed[0]
                continue
            of_variable, parts[key] = merged(listed, static_count)
            squares[group_of[key]].append(tf.reshape(of_variable, [count]))
    with checked():
        for group, of_group in enumerate(small):
            if of_group:
                key, pool = ("small", group), Pooled(of_group)
                parts[key], group_of[key] = [pool], group
                squares[group].append(tf.reshape(pool.squared_norms(), [count]))
        for group, of_group in enumerate(matrices):
            for of_variables in gram.squared_norms_of(of_group):
                squares[group].append(tf.reshape(of_variables, [count]))
    squares = [rounding.add_up(of_group) for of_group in squares]
    squares = squares[0] if groups is None else tf.stack(squares, 1)
    norms = tf.sqrt(tf.where(squares < _NOTHING**2, tf.zeros_like(squares), squares))
    weights = [w for w in clip_weights(norms) if w is not None]
    sums = _weighted_sums(parts, group_of, split_by_group(norms, weights, groups))
    in_order = lambda r: [sums[r].get(id(v._value)) for v in model.trainable_variables]
    return GradientSums(
        head=in_order(0),
        residual=in_order(1) if len(weights) > 1 else None,
        losses=losses[:rows_given] if units.microbatches else losses,
        y_pred=tf.nest.map_structure(lambda t: t[:rows_given], y_pred)
        if units.microbatches
        else y_pred,
        norms=norms,
    )


def _with_unknown_batch(tensor):
    """Hides the batch size in graphs: a leading axis that is known is then no batch axis."""
    tensor = tf.convert_to_tensor(tensor)
    if tf.executing_eagerly() or tensor.shape.rank in (None, 0):
        return tensor
    return tf.compat.v1.placeholder_with_default(tensor, [None, *tensor.shape[1:]])


def _pull_back(tape, total, calls):
    """Fills in the cotangents of all calls with one backward pass."""
    watched = [tensor for call in calls for tensor in call.watched]
    gradients = iter(tape.gradient(total, watched))
    for call in calls:
        cotangents = [next(gradients) for _ in call.watched]
        if all(c is None for c in cotangents):
            continue
        call.cotangents = [
            tf.zeros_like(t) if c is None else tf.ensure_shape(tf.convert_to_tensor(c), t.shape)
            for c, t in zip(cotangents, call.watched, strict=True)
        ]


def _by_variable(calls, batch):
    """Returns `{id: (variable, contributions)}` over all uses of every variable."""
    found = {}
    for call in calls:
        if call.rule is None:
            pairs = local_gradients.contributions(call, batch)
        else:
            if len(call.cotangents) == 1:
                call.cotangents = call.cotangents[0]
            pairs = call.rule.contributions(call.layer, call)
            _refuse_incomplete(call, pairs)
        wanted = {id(v._value) for v in call.variables}
        for variable, contribution in pairs:
            key = id(variable._value)
            if key in wanted:
                found.setdefault(key, (variable, []))[1].append(contribution)
    return found


def _refuse_incomplete(call, pairs):
    covered = {id(variable._value) for variable, _ in pairs}
    missing = [v.path for v in call.variables if id(v._value) not in covered]
    if missing:
        raise GradientEngineError(
            f"The rule for layer '{call.path}' ({type(call.layer).__name__}) returned no "
            f"contribution for its trainable weights {missing}. A rule must cover every weight "
            "of its layer: extend it, or let its `supports` argument return False for this case."
        )


def _batch_axis_checks(calls, batch):
    """Assertions that every layer saw examples, and nothing else, on its first axis."""
    if not calls:
        return []
    # Of cotangents: one more reader of a sum would keep its activation from being fused with it.
    shapes = [tf.shape(tf.nest.flatten(call.cotangents)[0]) for call in calls]
    # From one vector, because to take an entry out of each takes five operations.
    starts = [0, *itertools.accumulate(shape.shape[0] for shape in shapes[:-1])]
    sizes = tf.gather(tf.concat(shapes, 0), starts)
    check = tf.debugging.Assert(
        tf.reduce_all(sizes == batch),
        [
            "Layers must be called with the batch axis first. Sizes of the first axis were",
            sizes,
            "for a batch of",
            batch,
            f"in layers {[call.path for call in calls]}. Keep the batch axis separate from other "
            "axes, or set gradient_engine='vectorized'.",
        ],
        summarize=len(calls),
    )
    return [] if check is None else [check]


def _weighted_sums(parts, group_of, groups):
    """Returns one `{id: sum}` for the heads and, if there are weights for them, the residuals.

    Args:
        parts: `{key: contributions}`, by the id of a variable, or a `Pooled` of several.
        group_of: `{key: int}`, the group of each.
        groups: List of pairs of norms and weights, one per group.
    """
    keys = list(parts)
    kinds = len(groups[0][1])
    splits = [residual_rows(w[0], w[1], norms) if kinds == 2 else None for norms, w in groups]
    # A gradient that is broken in one group counts nowhere.
    finite = functools.reduce(tf.logical_and, [tf.math.is_finite(norms) for norms, _ in groups])
    cleared = _without_broken(parts, finite) if keys else parts
    with_rows = {}
    for group, split in enumerate(splits):
        of_group = [part for key in keys if group_of[key] == group for part in cleared[key]]
        chosen = [part for part in of_group if _is_ours(part) and part.prefers_rows()]
        if split is not None and chosen:
            pairs = heads_and_residuals(chosen, groups[group][1][0], split)
            with_rows.update(zip(map(id, chosen), pairs, strict=True))
    flat = []
    for key in keys:
        weights = groups[group_of[key]][1]
        each = [with_rows.get(id(part)) or part.weighted_sums(weights) for part in cleared[key]]
        of_kinds: Any = zip(*each, strict=True)
        flat += [tf.add_n(s) if len(s) > 1 else s[0] for s in of_kinds]
    sums = [dict(zip(keys, flat[r::kinds], strict=True)) for r in range(kinds)]
    for key, (part, *_) in parts.items():
        if isinstance(part, Pooled):
            for of_kind in sums:
                of_kind |= part.by_variable(of_kind.pop(key))
    return sums


def _without_broken(parts, finite):
    """Returns contributions in which the rows of broken examples are 0, if there are any.

    A broken example has weight 0, but 0 * inf is NaN. Clearing its rows costs a copy of
    everything, so that is done only in batches that need it. The branch is around what the
    sums read, not around the sums: they would be traced, optimised and kept twice.

    Args:
        parts: `{id: contributions}`, by variable.
        finite: Bool `[units]`.
    """
    broken = tf.logical_not(finite)
    parts = {
        key: [part if _is_ours(part) else part.without(broken) for part in of_variable]
        for key, of_variable in parts.items()
    }
    listed = [part for of_variable in parts.values() for part in of_variable]
    names = [
        [name for name, value in vars(part).items() if tf.is_tensor(value) and _is_float(value)]
        for part in listed
    ]
    read = lambda parts: [
        getattr(part, name) for part, chosen in zip(parts, names, strict=True) for name in chosen
    ]
    tensors = iter(
        tf.cond(
            tf.reduce_all(finite),
            lambda: read(listed),
            lambda: read([part.without(broken) for part in listed]),
        )
    )
    copies = {}
    for part, chosen in zip(listed, names, strict=True):
        copies[id(part)] = copy.copy(part)
        for name in chosen:
            tensor, shape = next(tensors), getattr(part, name).shape
            if tensor.shape.rank is None or tensor.shape.as_list() != shape.as_list():
                tensor = tf.ensure_shape(tensor, shape)
            setattr(copies[id(part)], name, tensor)
    return {key: [copies[id(part)] for part in parts[key]] for key in parts}


def _is_ours(part):
    """Whether it is known where a contribution keeps what its sums read, and what they do.

    Of a class of a user's own, a subclass of one here as well, only the methods are known that
    every contribution has.
    """
    return type(part).__module__ == OuterProduct.__module__


def _is_float(tensor):
    return tensor.dtype.is_floating
