# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Norms of per-example gradients on public data, to choose the clipping threshold by.

Norms of private examples tell about them, and no noise covers that. So data that a sampler of
`dice_tf` drew is refused, and a model is left as it was found.
"""

import dataclasses
import functools
import os
import textwrap
from typing import Any

import keras
from keras.src.backend.common import global_state
import numpy as np
import tensorflow as tf

from dice_tf.checks import self_check
from dice_tf.checks.arguments import check_integer
from dice_tf.distribution import strategies
from dice_tf.engine import layerwise, units
from dice_tf.errors import (
    GradientEngineError,
    LossError,
    MissingPackageError,
    PlainGradientsError,
    SamplingError,
)
from dice_tf.ledger import admission
from dice_tf.sampling import conversion
from dice_tf.training import private_step
from dice_tf.training.optimizer_arguments import check_engine
from dice_tf.training.own_train_steps import values_kept
from dice_tf.training.run import is_private

__all__ = ["GradientNorms", "gradient_norms"]

PERCENTS = (10, 25, 50, 75, 90, 99)
_ROWS_AT_A_TIME = 256


@dataclasses.dataclass(frozen=True, eq=False)
class GradientNorms:
    """Norms of the gradients of public examples, which `gradient_norms` returns.

    `print` shows the quantiles, and how to choose `l2_norm_clip` by them.

    Args:
        norms: Float32 `[examples]`, the norm of each gradient over all trainable variables, in
            units of the gradient. Examples of weight 0 are left out. With `num_microbatches`
            there is one for each whole microbatch. What is not finite contributes nothing to
            training.

    Example:

    >>> norms = GradientNorms(np.linspace(0.0, 2.0, 101, dtype="float32"))
    >>> {percent: round(norm, 2) for percent, norm in norms.quantiles.items()}
    {10: 0.2, 25: 0.5, 50: 1.0, 75: 1.5, 90: 1.8, 99: 1.98}
    >>> print(norms)
    Norms of 101 public gradients, over all trainable variables:
      quantile     10 %     25 %     50 %     75 %     90 %     99 %
      norm          0.2      0.5        1      1.5      1.8     1.98
    With error feedback, most gradients should be longer than l2_norm_clip, and norms fall as
    the model learns: start at the 10 % quantile, 0.2, or below, and scale learning_rate by 1 /
    l2_norm_clip. For DP-SGD (error_norm_clip=0) the usual start is the median, 1.
    """

    norms: np.ndarray

    @property
    def quantiles(self) -> dict[int, float]:
        """The 10, 25, 50, 75, 90 and 99 % quantiles of the finite norms, by percent."""
        values = np.quantile(self._finite(), np.divide(PERCENTS, 100))
        return dict(zip(PERCENTS, map(float, values), strict=True))

    def __str__(self) -> str:
        quantiles = self.quantiles
        cells = lambda texts: "".join(f"{text:>9}" for text in texts)
        broken = len(self.norms) - len(self._finite())
        note = f"; {broken} that are not finite are left out" * (broken > 0)
        return "\n".join(
            [
                f"Norms of {len(self.norms)} public gradients, over all trainable variables{note}:",
                "  quantile" + cells(f"{percent} %" for percent in quantiles),
                "  norm    " + cells(f"{norm:.3g}" for norm in quantiles.values()),
                _advice(quantiles),
            ]
        )

    def plot(self, path: str | os.PathLike) -> None:
        """Draws a histogram of the norms, with their quantiles, into a file.

        Args:
            path: Path of the file; its ending decides the format.

        Raises:
            MissingPackageError: If matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingPackageError(
                "`plot` needs the package matplotlib, which cannot be imported. Received: "
                f"{type(error).__name__}: {error}. `pip install matplotlib`, or print the norms."
            ) from error
        norms = self._finite()
        positive = norms[norms > 0]
        figure = Figure(figsize=(7.5, 4.0), layout="constrained")
        axes = figure.subplots()
        bins = 30
        if len(positive):
            # Norms differ by orders of magnitude. Those of 0 are left of all others.
            axes.set_xscale("log")
            norms = np.maximum(norms, positive.min())
            bins = np.geomspace(positive.min() / 1.05, positive.max() * 1.05, 31)
        axes.hist(norms, bins=bins, color="#0072b2", alpha=0.7)
        for percent, norm in self.quantiles.items():
            if norm > 0:
                axes.axvline(norm, color="#555555", linewidth=1, linestyle="--")
                place = (norm, 1.01)
                axes.annotate(
                    f"{percent} %", place, xycoords=("data", "axes fraction"),
                    ha="center", va="bottom", fontsize=8,
                )  # fmt: skip
        axes.set_xlabel("norm of the gradient of an example")
        axes.set_ylabel("examples")
        figure.savefig(path, dpi=150)

    def _finite(self):
        return self.norms[np.isfinite(self.norms)].astype(np.float64)


def gradient_norms(
    model: keras.Model, public_batch: Any, chunk_size: int | None = None
) -> GradientNorms:
    r"""Returns the norms of the gradients of public examples, to choose `l2_norm_clip` by.

    \[n_i = \lVert \nabla_x \ell_i(x) \rVert\]

    over all trainable variables, with dropout as in training. Neither the variables of the
    model, its random seeds and metrics nor its optimizer change; a model that is not built is.
    The same checks as before training are made.

    The examples must be public: their norms are shown as they are, and epsilon does not count
    them. What a sampler drew is refused as far as it can be told: by the data set, and by the
    mark in the sample weights of a batch. Batches of `ShuffledEpochs`, and arrays, have no mark.

    Args:
        model: Keras model compiled with a loss, and with any optimizer.
        public_batch: `(x, y)` or `(x, y, sample_weight)`: arrays or tensors `[examples, ...]`, or
            nests of them. A weight scales the gradient; examples of weight 0 are left out.
        chunk_size: Int >= 1: so many rows are computed at a time, about 256 by default. Bounds
            memory; a multiple of the rows that the optimizer clips together.

    Returns:
        `GradientNorms`. Its `norms` are of the units that the optimizer clips.

    Raises:
        SamplingError: If a sampler drew the data, or they are no batch.
        LossError: If the loss has no value per example, or no norm is finite.
        ModelError: If the model cannot be trained privately.
        GradientEngineError: If gradients of single examples are not those in a batch, or
            `chunk_size` is out of range.
        PlainGradientsError: If `train_step` is overridden, and the optimizer is not private.

    Example:

    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])
    >>> model.compile("sgd", loss="mse")
    >>> model.set_weights([np.zeros((3, 1))])
    >>> public = np.eye(3) * [[1.0], [2.0], [4.0]], np.ones((3, 1))
    >>> gradient_norms(model, public).norms.tolist()
    [2.0, 4.0, 8.0]

    Source: Abadi et al., CCS 2016, Sec. 5.2 (the median of the norms as the threshold).
    """
    x, y, sample_weight = _public_parts(public_batch)
    optimizer = getattr(model, "optimizer", None)
    if chunk_size is None:
        together = optimizer.mechanism.rows_clipped_together if is_private(optimizer) else 1
        chunk_size = max(1, _ROWS_AT_A_TIME // together) * together
    check_integer("chunk_size", chunk_size, error=GradientEngineError)
    batch = (x, y) if sample_weight is None else (x, y, sample_weight)
    if is_private(optimizer):
        model, batch = private_step.received_by_step(model, batch)
        optimizer = model.optimizer
        check_engine(optimizer.gradient_engine, optimizer.mechanism, chunk_size)
    elif type(model).train_step is not keras.Model.train_step:
        raise PlainGradientsError(
            f"Model '{model.name}' ({type(model).__name__}) overrides `train_step`, so it is not "
            "known what a private step would be given. Received: optimizer="
            f"{type(optimizer).__name__}. Compile with the private optimizer that is to train it."
        )
    x, y, sample_weight = private_step.unpack(model, batch)
    strategy = model.distribute_strategy
    with strategy.scope():
        symbols = private_step.build_and_check_layers(model, x, y, sample_weight)
        with values_kept(_random_state(model)):
            private_step.check_calls(model, *symbols)
            with strategies.first_replica(strategy):
                norms = _norms(model, (x, y, sample_weight), chunk_size)
    if not np.isfinite(norms).any():
        raise LossError(
            f"No gradient of model '{model.name}' is finite, so none would contribute to training. "
            f"Received: {len(norms)} norms that are nan or infinite. Look for inputs and targets "
            "that are not finite, and losses or weights that overflow."
        )
    return GradientNorms(norms)


def _norms(model, batch: Any, chunk_size):
    """Returns the norms of the units of a batch that have a weight, as NumPy float32.

    Args:
        model: The model, built and checked.
        batch: `(x, y, sample_weight)` as tensors; the last may be `None`.
        chunk_size: Int, examples that are computed at a time.
    """
    x, y, sample_weight = batch
    rows = tf.nest.flatten(x)[0].shape[0]
    engine, unit, compiled = layerwise.weighted_gradient_sums, 1, False
    traced = model.distribute_strategy.num_replicas_in_sync > 1
    optimizer = model.optimizer
    if is_private(optimizer):
        engine, unit = private_step.engine_of(optimizer), optimizer.mechanism.rows_clipped_together
        # As before training: some layers need it with this engine.
        vectorized = optimizer.gradient_engine == "vectorized"
        compiled, traced = bool(model.jit_compile) and vectorized, traced or vectorized
    if sample_weight is None:
        sample_weight = tf.ones([rows])
    whole = rows // unit * unit
    present = units.present_units(sample_weight, rows, unit).numpy()[: rows // unit] > 0
    if not present.any():
        raise SamplingError(
            "There is no gradient to take the norm of: no example has a weight, or they are fewer "
            f"than a microbatch. Received: {rows} examples in microbatches of {unit}."
        )
    if unit == 1 and getattr(optimizer, "self_check", True):
        run = functools.partial(engine, model)
        if not self_check.check_against_single_examples(
            model, run, batch[0], batch[1], batch[2], compiled, 1, traced
        ):
            self_check.warn_unchecked(model, batches=1)
    batch = x, y, sample_weight
    # Sums are not asked for, so that TensorFlow leaves them out.
    no_sums = lambda norms: (tf.zeros_like(norms), None)
    of_chunk = tf.function(
        lambda x, y, sample_weight: engine(model, x, y, sample_weight, no_sums).norms,
        input_signature=tf.nest.map_structure(
            lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), batch
        ),
        autograph=False,
        jit_compile=True if compiled else None,
    )
    found = []
    for start in range(0, whole, chunk_size):
        end = min(start + chunk_size, whole)
        found.append(of_chunk(*tf.nest.map_structure(lambda leaf: leaf[start:end], batch)))
    return np.concatenate([norms.numpy() for norms in found]).astype(np.float32)[present]


def _public_parts(batch):
    """Returns `(x, y, sample_weight)` with arrays or tensors as leaves; refuses private data."""
    drawn = admission.samplings_anywhere(batch)
    if drawn:
        _refuse_private(f"{drawn[0]!r} draws it")
    if not isinstance(batch, (tuple, list)) or len(batch) not in (2, 3):
        raise SamplingError(
            "Argument `public_batch` must be one batch, `(x, y)` or `(x, y, sample_weight)`. "
            f"Received: {type(batch).__name__}"
            + (f" of {len(batch)} parts" if isinstance(batch, (tuple, list)) else "")
            + ". Of a data set of public examples pass `next(iter(data))`."
        )
    names = ("x", "y", "sample_weight")
    parts = [
        keras.tree.map_structure(functools.partial(_leaf, name), part)
        for name, part in zip(names, batch, strict=False)
    ]
    x, y, sample_weight = (*parts, None)[:3]
    marks = sum(
        int(np.count_nonzero((leaf == 0) & np.signbit(leaf)))
        for leaf in map(np.asarray, _leaves(sample_weight))
    )
    if marks:
        _refuse_private(f"of its sample weights {marks} are -0.0, the mark of a sampler's batch")
    sizes = {leaf.shape[0] if len(leaf.shape) else None for leaf in _leaves((x, y, sample_weight))}
    if len(sizes) != 1 or None in sizes:
        raise SamplingError(
            "All parts of `public_batch` must have one row per example, on their first axis. "
            f"Received: shapes {[tuple(leaf.shape) for leaf in _leaves((x, y, sample_weight))]}."
        )
    return x, y, sample_weight


def _refuse_private(reason):
    raise SamplingError(
        f"Argument `public_batch` is not public: {reason}. Norms of gradients are shown without "
        "noise, so they would tell about private examples. Pass arrays of public examples of the "
        "same kind, or of made-up ones."
    )


def _leaf(name, leaf):
    if leaf is None or tf.is_tensor(leaf) or hasattr(leaf, "tocsr"):
        return leaf  # Sparse ones are made dense with the batch.
    return conversion.to_array(name, leaf)


def _leaves(structure):
    return [leaf for leaf in keras.tree.flatten(structure) if leaf is not None]


def _random_state(model):
    """Returns random seeds and states of metrics: all that a call may change."""
    kept = {}
    for layer in model._flatten_layers():
        states = [generator.state for generator in getattr(layer, "_seed_generators", ())]
        states += [variable for metric in layer._metrics for variable in metric.variables]
        kept.update((id(variable), variable) for variable in states)
    # Of layers that draw without a generator of their own.
    shared = global_state.get_global_attribute("global_seed_generator")
    if shared is not None:
        kept[id(shared.state)] = shared.state
    return kept.values()


def _advice(quantiles):
    above = [(percent, norm) for percent, norm in quantiles.items() if norm > 0]
    if not above:
        return "All are 0: nothing to choose from. Look for a loss that is flat at these weights."
    percent, start = above[0]
    return textwrap.fill(
        "With error feedback, most gradients should be longer than l2_norm_clip, and norms fall as "
        f"the model learns: start at the {percent} % quantile, {start:.3g}, or below, and scale "
        "learning_rate by 1 / l2_norm_clip. For DP-SGD (error_norm_clip=0) the usual start is the "
        f"median, {quantiles[50]:.3g}.",
        width=92,
    )
