# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares a gradient engine with plain gradients of single examples, on real data.

A closed form may be wrong, a custom layer or loss may let examples see each other: both
show when the gradient of an example in a batch differs from its gradient alone, or changes
with the other examples. A batch of another size rounds otherwise, which a deep network with
kinks amplifies to several percent, so a difference from alone is weighed against what
rounding does to the gradient alone (`rounding`). Other examples in a batch of the same size
change no rounding. Random layers are silenced, because a Dropout mask depends on the batch.
"""

import functools
from typing import Any, NamedTuple
import warnings

import keras
import numpy as np
import tensorflow as tf

from dice_tf.checks import failures, rounding
from dice_tf.checks.different_examples import groups_of_different_examples, keys, map_leaves
from dice_tf.checks.silenced_draws import silenced, silencers
from dice_tf.checks.unoptimised import unoptimised
from dice_tf.engine import rules
from dice_tf.engine.loss import call_in_training, compiled_loss, per_example_losses
from dice_tf.engine.overrides import overridden
from dice_tf.errors import GradientEngineError, UncheckedGradientsWarning

_WEIGHTS = (1.0, 0.5, 0.25)  # One per example that is compared at a time.
# Far above rounding (and above TF32 on GPUs), far below what mixing examples does.
_TOLERANCE = 0.01
_TOLERANCE_HALF_PRECISION = 0.1
# Of the same batch but for one example: the others are computed bit by bit as before.
_TOLERANCE_EXCHANGED = 1e-4
# A norm that is too large costs accuracy and no privacy.
_MOST_RAISED = 10
_REPEATS = 3
# How far a difference must stand out from what chance or rounding is seen to make.
_MARGIN = 3.0
# Squares of smaller norms are 0 in float32, squares of larger ones infinite.
_SMALLEST, _LARGEST = 1e-15, 1e15


class _Comparison(NamedTuple):
    """A few examples, and the two computations that are compared for them.

    Attributes:
        model: The model.
        together: Function `(x, y, weights) -> (norms, weighted sum)` of as many examples.
        alone: Function `(x, y) -> gradient` of one example.
        rows: Function from indices to `(x, y)`.
        group: Indices of the examples.
        spare: Index of an example to exchange one of them for.
    """

    model: Any
    together: Any
    alone: Any
    rows: Any
    group: list
    spare: int

    def run(self, weights, exchanged=None):
        """Returns norms and weighted sum, of all or with one position held by the spare."""
        group = list(self.group)
        if exchanged is not None:
            # Its neighbour, if the spare is at this place already.
            group[exchanged] = (
                self.spare if self.spare != group[exchanged] else group[exchanged - 1]
            )
        norms, total = self.together(*self.rows(group), tf.constant(weights, tf.float32))
        return norms.numpy(), total


def check_against_single_examples(
    model, engine, x, y, sample_weight=None, jit_compile=False, rows_per_unit=1, traced=False
):
    """Raises if the engine's gradients are not those of the examples on their own.

    Args:
        model: A built and compiled Keras model.
        engine: Function `(x, y, sample_weight, clip_weights) -> GradientSums`.
        x: Inputs of a batch; a few different examples are used.
        y: Targets of the batch.
        sample_weight: `None`, or the weights of the batch: examples of weight 0 are not used.
        jit_compile: Whether the engine is compiled with XLA.
        rows_per_unit: Int, consecutive rows that are clipped as one. What is compared is then
            units, with the mean gradient of their rows, all of weight 1.
        traced: Whether the engine traces a function of its own in every eager call.

    Returns:
        Whether that is settled. `False` if this batch has nothing to compare: no example of
        nonzero weight, or only gradients that are 0 or not finite.

    Raises:
        GradientEngineError: If norms or weighted sums change with the other examples, differ
            from those alone by more than rounding explains, are finite in the batch and not
            alone, or the reverse; or if a few examples, or one, cannot be computed at all.
    """
    # XLA is part of what is compared only where the engine is not safe without it.
    with unoptimised():
        return _compare(model, engine, x, y, sample_weight, jit_compile, rows_per_unit, traced)


def _compare(model, engine, x, y, sample_weight, jit_compile, rows_per_unit, traced):
    whole = x, y
    if rows_per_unit > 1:
        parts = (x, y, sample_weight)
        x, y, sample_weight = (map_leaves(lambda t: _units(t, rows_per_unit), p) for p in parts)
    groups = groups_of_different_examples(x, y, sample_weight, len(_WEIGHTS))
    if not groups:
        return False
    x, y = (map_leaves(lambda t: tf.gather(t, sum(groups, [])), part) for part in (x, y))
    count = len(groups[0])
    if count == 1:
        # All examples are alike. One that differs keeps it company, for a layer to mix it with.
        count = 2
        x, y = (map_leaves(lambda t: tf.stack([t[0], tf.zeros_like(t[0])]), p) for p in (x, y))
        if len(set(keys(x, count))) < count:
            return False
        groups = groups[:1]
    take = lambda t, indices: _rows(tf.gather(t, indices), rows_per_unit)
    rows = lambda indices: tuple(map_leaves(lambda t: take(t, indices), p) for p in (x, y))
    with overridden(silencers()), silenced() as draws:
        few, one = rows(range(count)), rows([0])
        functions = _functions(model, engine, jit_compile, rows_per_unit)
        # Running so few steps takes a fraction of tracing them, but for loops over time.
        loops = any(isinstance(layer, keras.layers.RNN) for layer in model._flatten_layers())
        if traced or jit_compile or loops or not _is_stock(model):
            weights = tf.zeros([count])
            functions = _traced(functions, (*few, weights), one, model, whole)
        if not draws.loud:
            for n in range(len(groups)):
                group = list(range(n * count, (n + 1) * count))
                # Somebody of the next group where there is one, else one of the group itself.
                spare = (n + 1) * count % (len(groups) * count)
                if _agree(_Comparison(model, *functions, rows, group, spare), whole):
                    return True
            return False
    warnings.warn(
        f"The gradients of model '{model.name}' were not compared with those of single "
        f"examples: a layer draws with keras.random.{draws.loud}, whose draws cannot be made "
        "the same for one example and for several. Make sure that it does not mix examples.",
        UncheckedGradientsWarning,
        stacklevel=3,
    )
    return True


def warn_unchecked(model, batches):
    """Warns that nothing could be compared.

    Args:
        model: A Keras model.
        batches: Int, the number of batches tried.
    """
    warnings.warn(
        f"The gradients of model '{model.name}' could not be compared with those of single "
        "examples, so it is not known whether a layer or the loss mixes examples: they were 0 or "
        f"not finite, or there was no example, in all batches tried. Batches tried: {batches}. "
        "Call `dice_tf.check_gradients(model, batch)` with another one.",
        UncheckedGradientsWarning,
        stacklevel=3,
    )


def warn_switched_off(model):
    """Warns of what nobody looks at when the check is switched off.

    Args:
        model: A compiled Keras model.
    """
    names = [
        f"layer '{layer.name}' ({type(layer).__name__})"
        for layer in model._flatten_layers()
        if not _is_of_keras(layer) or isinstance(layer, keras.layers.Lambda)
    ]
    names += [
        f"loss '{getattr(loss, 'name', getattr(loss, '__name__', loss))}'"
        for loss in keras.tree.flatten(compiled_loss(model)._user_loss)
        if callable(loss) and not _is_of_keras(loss)
    ]
    warnings.warn(
        f"self_check=False: nobody checks that examples of model '{model.name}' keep apart, in "
        f"{', '.join(names) or 'its layers and losses'}. If one sees the others there, epsilon is "
        "void. `dice_tf.check_gradients(model, batch)` checks once.",
        UncheckedGradientsWarning,
        stacklevel=2,
    )


def _is_stock(model):
    """Whether no code of a model, of its loss or of the rules for its layers is a user's.

    Only that may do something else in a graph, as which the step runs.
    """
    parts = [*model._flatten_layers(), *keras.tree.flatten(compiled_loss(model)._user_loss)]
    parts += [operation for part in parts for operation in getattr(part, "operations", ())]
    # Such as activations; or a `call` that was set on one layer.
    held = [value for part in parts for value in getattr(part, "__dict__", {}).values()]
    # Such as what `keras.ops.scan` does at every step.
    nodes = [node for part in parts for node in getattr(part, "_inbound_nodes", ())]
    held += keras.tree.flatten([(node.arguments.args, node.arguments.kwargs) for node in nodes])
    of_keras = all(_is_of_keras(thing) for thing in (*parts, *held) if callable(thing))
    found = filter(None, (rules.rule_of(type(part)) for part in parts))
    return of_keras and all(rule.contributions.__module__.startswith("dice_tf.") for rule in found)


def _is_of_keras(thing):
    module = getattr(thing, "__module__", None) or type(thing).__module__
    return module.split(".")[0] in ("keras", "keras_hub")


def _units(tensor, rows_per_unit):
    """Makes whole units of the rows of an eager tensor; a last part of one is left out."""
    count = tensor.shape[0] // rows_per_unit
    shape = [count, rows_per_unit, *tensor.shape[1:]]
    return tf.reshape(tensor[: count * rows_per_unit], shape)


def _rows(units, rows_per_unit):
    if rows_per_unit == 1:
        return units
    return tf.reshape(units, [units.shape[0] * rows_per_unit, *units.shape[2:]])


def _functions(model, engine, jit_compile, rows_per_unit):
    """Returns the functions `together` and `alone` of a `_Comparison`."""
    variables = model.trainable_variables

    def together(x, y, weights):
        clip = lambda norms: (tf.where(tf.math.is_finite(norms), weights, 0.0), None)
        run = lambda x, y: engine(x, y, None, clip)
        sums = (tf.function(run, jit_compile=True, autograph=False) if jit_compile else run)(x, y)
        return sums.norms, rounding.vectors(sums.head, variables)

    def alone(x, y):
        values = [v.value for v in variables]
        with tf.GradientTape() as tape:
            losses = per_example_losses(model, x, y, call_in_training(model, x), None)
            loss = tf.reduce_sum(losses) / rows_per_unit
        return rounding.vectors(tape.gradient(loss, values), variables)

    return together, alone


def _traced(functions, few, one, model, whole):
    """Returns the two functions, traced once each."""
    # Concrete functions, because TensorFlow warns of functions that are traced anew.
    trace = lambda f, args: tf.function(f, autograph=False).get_concrete_function(*args)
    together, alone = functions
    return failures.both(
        model,
        lambda: trace(together, few),
        lambda _: trace(alone, one),
        few[:2],
        one,
        whole,
    )


def _agree(comparison, whole):
    """Whether the gradients agree; `False` if they decide nothing; raises if they differ."""
    model, group = comparison.model, comparison.group
    weights = _WEIGHTS[: len(group) - 1] + (0.0,)
    (norms, total), (expected, rest) = failures.both(
        model,
        lambda: comparison.run(weights),
        lambda found: _without_single(comparison, weights, *found),
        comparison.rows(group),
        comparison.rows(group[:1]),
        whole,
    )
    finite = np.isfinite(norms) & np.isfinite(expected)
    # How large a gradient may get before its norm is infinite is up to the formula.
    too_large = ~np.isfinite(norms) & np.isfinite(expected) & (expected > _LARGEST)
    one_only = (np.isfinite(norms) != np.isfinite(expected)) & ~too_large
    scale = max(norms[finite].max(initial=0), expected[finite].max(initial=0))
    if scale < _SMALLEST and not one_only.any():
        return False
    tolerance = _tolerance(model) * scale
    differs = np.abs(norms - expected)[finite].max(initial=0) > tolerance
    if one_only.any() or differs or not rest <= tolerance:
        for position in range(len(group)):
            _refuse_influence(comparison, position, scale)
        _refuse_beyond_rounding(comparison, expected, too_large, tolerance)
        return True
    _refuse_influence(comparison, len(group) - 1, scale, (norms, total))
    return True


def _without_single(comparison, weights, norms, total):
    """Returns norms of single gradients, and that of a weighted sum without these gradients.

    One gradient at a time is in memory: each may be as large as the model.
    """
    expected = []
    for index, weight, together in zip(comparison.group, weights, norms, strict=True):
        gradient = comparison.alone(*comparison.rows([index]))
        expected.append(rounding.norm(gradient))
        if weight and np.isfinite(together):
            total = list(rounding.difference(total, gradient, weight))
    return np.array(expected), rounding.norm(total)


def _refuse_influence(comparison, position, scale, before=None):
    """Raises if another example at one position changes the gradients of the others."""
    others = np.arange(len(comparison.group)) != position
    weights = _WEIGHTS[: len(others)] * others
    run = lambda exchanged=None: comparison.run(weights, exchanged)
    before = run() if before is None else before
    after = run(position)
    influence = _difference(before, after, others)
    if influence <= _TOLERANCE_EXCHANGED * scale:
        return
    # Unless the same examples give something else each time, too.
    chance = max(_difference(before, run(), others) for _ in range(_REPEATS))
    if influence > _MARGIN * chance:
        _refuse(comparison.model, before[0], "with another companion", after[0])
    warnings.warn(
        f"The gradients of model '{comparison.model.name}' change from run to run on the same "
        "examples, so it is not known whether a layer or the loss mixes examples. Draw random "
        "numbers with keras.random and a SeedGenerator of the layer.",
        UncheckedGradientsWarning,
        stacklevel=3,
    )


def _difference(before, after, rows):
    """Returns by how much norms of some rows, or their weighted sum, differ."""
    first, second = before[0][rows], after[0][rows]
    finite = np.isfinite(first)
    if (finite != np.isfinite(second)).any():
        return np.inf
    return max(
        np.abs(first - second)[finite].max(initial=0),
        rounding.norm(rounding.difference(before[1], after[1])),
    )


def _refuse_beyond_rounding(comparison, expected, too_large, tolerance):
    """Raises unless what rounding does to single examples explains how they differ in a batch."""
    perturbed = None
    for i, index in enumerate(comparison.group):
        if too_large[i]:
            continue
        x, y = comparison.rows([index])
        alone = comparison.alone(x, y)
        norms, gradient = comparison.run(np.eye(len(expected))[i])
        refuse = functools.partial(_refuse, comparison.model, norms, "alone", expected)
        # Of one and the same gradient. Gram matrices raise norms where positions cancel.
        raised = norms[i] - rounding.norm(gradient)
        if np.isfinite(norms[i]) and not -tolerance <= raised <= _MOST_RAISED * tolerance:
            refuse()
        if not np.isfinite(norms[i]):
            gradient = [vector * np.nan for vector in gradient]
        difference = rounding.distance(gradient, alone)
        if difference <= tolerance:
            continue
        explains = lambda draw: difference <= _MARGIN * rounding.distance(draw, alone)
        size, seeds = rounding.size(comparison.model), range(rounding.DRAWS)
        # First with a function that is there: inputs alone, where those are no indices.
        if rounding.has_fractions(x) and any(
            explains(comparison.alone(rounding.perturbed(x, size, (i, seed)), y)) for seed in seeds
        ):
            continue
        count = tf.nest.flatten(x)[0].shape[0]
        perturbed = perturbed or rounding.perturbed_gradient(comparison.model, x, y, count)
        if not any(explains(perturbed(x, y, tf.constant([i, seed]))) for seed in seeds):
            refuse()


def _refuse(model, norms, when, others):
    raise GradientEngineError(
        f"The gradients of {len(norms)} examples of model '{model.name}' depend on the other "
        f"examples of their batch: norms in the batch {norms.tolist()}, {when} {others.tolist()}. "
        "A layer or a loss mixes examples: look for reductions over axis 0 (nan or inf alone: one "
        "with nothing to reduce for a single example). Or a rule registered for a layer is wrong."
    )


def _tolerance(model):
    dtypes = {layer.compute_dtype for layer in model._flatten_layers()}
    return _TOLERANCE if dtypes <= {"float32", "float64", None} else _TOLERANCE_HALF_PRECISION
