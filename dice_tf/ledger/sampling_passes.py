# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Where one `fit` ends and the next begins, as the sampling record of the optimizer has it.

A pass over the data (a cycle of groups, or an epoch of `ShuffledEpochs`) that was cut short
is counted as if it had been finished. After it, or after another assignment of examples to
groups, an example could be drawn while its residual is still to be fed back: so the
error starts from 0.
"""

import contextlib
import math
from typing import Any
import warnings
import weakref

import keras
import tensorflow as tf

from dice_tf.accounting.events import check_run
from dice_tf.checkpoints import private_checkpoints
from dice_tf.errors import UnaccountedStepsWarning
from dice_tf.ledger import admission, claims, draw_origins, provenance, row_counts, units
from dice_tf.training.run import run_of
from dice_tf.training.thresholds import clip_thresholds


class PassCallback(keras.callbacks.Callback):
    """Writes down where passes over the data of a `fit` begin and end.

    Args:
        origin: The sampling that the steps are accounted by; `provenance.SEVERAL` or
            `provenance.UNSEEN` where there is none.
        found: List of `admission.Source`s behind the data, `None` if nobody claims `origin`.
    """

    # `fit` may call methods for batches in another thread; this class has none.
    async_safe = True

    def __init__(self, origin, found=None):
        super().__init__()
        self._origin, self._sources, self._has_begun = origin, found, False

    def on_train_begin(self, logs=None):
        """Refuses a sampling of another batch size than the optimizer's."""
        if self._sources is not None:
            check_run(self.model.optimizer.mechanism, self._origin, 0)
        self._has_begun = False

    def on_epoch_begin(self, epoch, logs=None):
        """Continues the pass that a private checkpoint holds, or closes the one that is open."""
        if not self._has_begun:
            # Not in `on_train_begin`, in which other callbacks load what they backed up.
            self._begin()
            self._has_begun = True
        elif getattr(self._origin, "whole_epochs", False):
            close_open_pass(self.model.optimizer, self._origin)
        row_counts.begin_epoch(self.model.optimizer)

    def on_epoch_end(self, epoch, logs=None):
        """Writes down how the steps so far were drawn, and counts their rows."""
        optimizer = self.model.optimizer
        record = provenance.join_sampling(provenance.read_record(optimizer), self._origin)
        if record["assignment"] < 0 and self._sources is not None:
            record["assignment"] = self._origin.assignment
        provenance.write_record(optimizer, record)
        if optimizer.built and self._sources is not None:
            row_counts.check(optimizer, self._origin)
        if logs is not None and optimizer.built and optimizer.mechanism.moves:
            # Of all layers together, and public.
            model: Any = self.model
            logs["l2_norm_clip"] = math.hypot(*clip_thresholds(model).values())

    def _begin(self):
        model: Any = self.model
        optimizer, origin = model.optimizer, self._origin
        is_claimed = self._sources is not None
        row_order = admission.row_order(self._sources)
        private_checkpoints.build_optimizer(model)
        claims.check_mechanism(optimizer)
        units.check_same_owners(optimizer, origin, begins=True)
        drawn_by = self._sources[0].sampling if self._sources else origin
        follows = is_claimed and private_checkpoints.continue_sampling(model, drawn_by)
        other_order = _is_other_order(optimizer, row_order)
        if not isinstance(origin, int) and (not follows or other_order):
            close_open_pass(optimizer, origin, row_order)
        private_checkpoints.note_row_order(optimizer._private, row_order)
        if is_claimed:
            draw_origins.check_seed(optimizer, origin)
        record = provenance.read_record(optimizer)
        provenance.write_record(optimizer, provenance.join_sampling(record, origin))
        _warn_of_discarded_steps(optimizer)


def with_passes(callbacks, found, unaccounted, budgets):
    """Returns the callbacks of `fit`, the first of which writes down its passes.

    So the others find that done, and `epsilon` of an `EpsilonCallback` in the logs.

    Args:
        callbacks: List of Keras callbacks.
        found: List of `admission.Source`s behind the data of this `fit`.
        unaccounted: What to record of this `fit`, from `fit_data.unaccounted_pass`.
        budgets: Each `EpsilonCallback` of this `fit`, which does the same.

    Returns:
        List of Keras callbacks.
    """
    added = []
    if unaccounted is not None:
        added = [PassCallback(unaccounted)]
    elif found and not budgets:
        added = [PassCallback(found[0].sampling, found)]
    # After each budget, whose claim it may contradict.
    return sorted([*callbacks, *added], key=lambda c: not isinstance(c, PassCallback))


@contextlib.contextmanager
def steps_of_fit(model, found, budgets):
    """Context of a private `fit`: its steps are known to be, and warned of if nobody counts them.

    Args:
        model: Compiled Keras model with a private optimizer.
        found: List of `admission.Source`s behind its data.
        budgets: Each `EpsilonCallback` of this `fit`.
    """
    optimizer, run = model.optimizer, run_of(model)
    if run.steps and run.trained_by() is not optimizer:
        warnings.warn(
            f"Another private optimizer has trained this model for {run.steps} steps, and this one "
            "counts from 0: its epsilon leaves them out. On the same data both trainings add up: "
            "`accounting.compose_epsilon`. To go on with one count, compile with the same "
            "optimizer, also after (un)freezing layers, and assign `optimizer.learning_rate`.",
            stacklevel=5,
        )
    before = provenance.read_record(optimizer)["steps"]
    try:
        with draw_origins.steps_of_fit(optimizer, found):
            yield
    finally:
        steps = provenance.read_record(optimizer)["steps"]
        run.trained_by, run.steps = weakref.ref(optimizer), steps
        if steps > before and not budgets and not optimizer._private.is_reported:
            optimizer._private.is_reported = True
            warnings.warn(
                f"`fit` took {steps - before} private steps of model '{model.name}' without an "
                "EpsilonCallback, so nobody has said what they cost. Ask: "
                "`dice_tf.run_epsilon(model, sampling, delta)`. Or pass `fit` "
                "callbacks=[dice_tf.EpsilonCallback(sampling, delta)]. Arrays are accounted as "
                "`dice_tf.ShuffledEpochs`; of several trainings, choosing one costs the epsilon "
                "of all.",
                UnaccountedStepsWarning,
                stacklevel=5,
            )


def warn_of_plain_steps(model):
    """Warns, when a `fit` without privacy begins, if the model was trained privately before.

    Args:
        model: Compiled Keras model whose optimizer is not private.
    """
    steps = run_of(model).steps
    if steps:
        warnings.warn(
            f"Model '{model.name}' was trained for {steps} private steps, and now trains without "
            f"privacy, by {type(model.optimizer).__name__}: no epsilon, past or future, covers the "
            "data of this `fit`. Use public data here, or compile with the private optimizer "
            "again.",
            stacklevel=4,
        )


def _warn_of_discarded_steps(optimizer):
    if not optimizer.built:
        return
    draws = int(optimizer._private.process_draws.numpy())
    discarded = draws - int(optimizer.iterations.numpy())
    if discarded > 0:
        warnings.warn(
            f"This process took {discarded} steps that are not in epsilon: weights of an earlier "
            "step were loaded after them. That is right if nothing of these steps was released or "
            "used for a decision. Otherwise compute the epsilon of all steps, as planned ones, by "
            "`accounting.compute_epsilon`; after a private checkpoint, see docs/saving.md.",
            stacklevel=2,
        )


def _is_other_order(optimizer, row_order):
    # `None` is unknown.
    return len({row_order, optimizer._private.row_order} - {None}) > 1


def close_open_pass(optimizer, sampling, row_order=None):
    """Counts a pass that was cut short as finished, and forgets what it would have fed back.

    Args:
        optimizer: A private optimizer.
        sampling: The object that draws the steps that follow.
        row_order: `admission.row_order` of their data, `None` if unknown.
    """
    steps = int(optimizer.iterations.numpy())
    if not steps:
        return
    record = provenance.read_record(optimizer)
    missing = -(steps + record["unfinished_steps"]) % sampling.steps_per_round
    record["unfinished_steps"] += missing
    several = sampling.num_groups > 1
    other_groups = record["assignment"] != sampling.assignment
    forgets = several and (missing or other_groups or _is_other_order(optimizer, row_order))
    # A schedule goes on after the steps that the pass lacks, where a residual would meet noise of
    # steps that its round is not accounted at.
    if forgets or (missing and optimizer._mechanism.schedule is not None):
        for error in optimizer.errors:
            error.assign(tf.zeros(error.shape))
    if missing and several:
        record["last_group"] = sampling.num_groups - 1
    record["assignment"] = sampling.assignment
    provenance.write_record(optimizer, record)
