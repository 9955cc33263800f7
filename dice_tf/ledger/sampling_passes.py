# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Where one `fit` ends and the next begins, as the sampling record of the optimizer has it.

A pass over the data (a cycle of groups, or an epoch of `ShuffledEpochs`) that was cut short
is counted as if it had been finished. After it, or after another assignment of examples to
groups, an example could be drawn while its residual is still to be fed back: so the
error starts from 0.
"""

import contextlib
import warnings
import weakref

import keras
import tensorflow as tf

from dice_tf.accounting.events import check_run
from dice_tf.checkpoints import private_checkpoints
from dice_tf.errors import UnaccountedStepsWarning
from dice_tf.ledger import admission, draw_origins, provenance, row_counts

# From a model to its last private optimizer and the steps that this one had made.
_trainings = weakref.WeakKeyDictionary()


def read_record(optimizer):
    """Returns the sampling record of an optimizer as a dictionary, see `provenance`.

    Args:
        optimizer: A private optimizer. One that its first batch will build has none yet.
    """
    stored = optimizer.sampling_record.numpy() if optimizer.built else None
    return provenance.unpack_record(provenance.initial_record() if stored is None else stored)


def begin(model, sampling, row_order=None):
    """Continues the pass that a private checkpoint holds, or closes the one that is open.

    To be called after other callbacks loaded what they load, and before the first step;
    calling it again before that step changes nothing.

    Args:
        model: Keras model compiled with a private optimizer.
        sampling: The object whose `dataset` feeds the steps that follow.
        row_order: `admission.row_order` of its data, `None` if unknown.
    """
    optimizer = model.optimizer
    private_checkpoints.build_optimizer(model)
    if optimizer.built:
        provenance.check_mechanism(optimizer.sampling_record, optimizer.mechanism)
    follows = private_checkpoints.continue_sampling(model, sampling)
    if not follows or _is_other_order(optimizer, row_order):
        close_open_pass(optimizer, sampling, row_order)
    private_checkpoints.note_row_order(optimizer._private, row_order)
    draw_origins.check_seed(optimizer, sampling)
    _write_record(optimizer, provenance.join_sampling(read_record(optimizer), sampling))
    _warn_of_discarded_steps(optimizer)


def note_reused_draws(optimizer, steps):
    """Records steps that used a batch which an earlier step had used, for good."""
    record = read_record(optimizer)
    _write_record(optimizer, dict(record, disordered_steps=record["disordered_steps"] + steps))


def note_assignment(optimizer, sampling):
    """Records how and from whose groups the steps so far were drawn, if nobody knew before."""
    record = provenance.join_sampling(read_record(optimizer), sampling)
    if record["assignment"] < 0:
        record["assignment"] = sampling.assignment
    _write_record(optimizer, record)


def with_passes(model, callbacks, found, unaccounted=None):
    """Returns the callbacks of `fit`, and one that begins its pass.

    `EpsilonCallback` does so, too, but need not be there in every `fit` of a run.

    Args:
        model: Compiled Keras model with a private optimizer.
        callbacks: What `fit` received: `None`, a callback, a nest of them or a `CallbackList`.
        found: List of `admission.Source`s behind the data of this `fit`.
        unaccounted: What to record of this `fit`, from `fit_data.unaccounted_pass`.

    Returns:
        The callbacks for Keras.
    """
    if unaccounted is not None:
        added = _NotePass(unaccounted)
    elif found:
        added = _BeginPass(found[0].sampling, admission.row_order(found))
    else:
        return callbacks
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.callbacks.append(added)
        callbacks.set_model(model)
        return callbacks
    return [*listed(callbacks), added]


def listed(callbacks):
    """Returns the callbacks of `fit` as a list, whichever of the forms that Keras takes it has."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks.callbacks
    return [] if callbacks is None else keras.tree.flatten(callbacks)


@contextlib.contextmanager
def warn_of_other_trainings(model):
    """Context of a `fit`: warns if another private optimizer trained the model before.

    Args:
        model: Compiled Keras model with a private optimizer.
    """
    optimizer = model.optimizer
    before, steps = _trainings.get(model, (lambda: optimizer, 0))
    if before() is not optimizer and steps:
        warnings.warn(
            f"Another private optimizer has trained this model for {steps} steps, and this one "
            "counts from 0: its epsilon leaves them out. On the same data both trainings add up: "
            "`accounting.compose_epsilon`. To go on with one count, compile with the same "
            "optimizer, also after (un)freezing layers, and assign `optimizer.learning_rate`.",
            stacklevel=4,
        )
    try:
        yield
    finally:
        _trainings[model] = weakref.ref(optimizer), int(optimizer.iterations.numpy())


def warn_of_plain_steps(model):
    """Warns, when a `fit` without privacy begins, if the model was trained privately before.

    Args:
        model: Compiled Keras model whose optimizer is not private.
    """
    steps = _trainings.get(model, (None, 0))[1]
    if steps:
        warnings.warn(
            f"Model '{model.name}' was trained for {steps} private steps, and now trains without "
            f"privacy, by {type(model.optimizer).__name__}: no epsilon, past or future, covers the "
            "data of this `fit`. Use public data here, or compile with the private optimizer "
            "again.",
            stacklevel=3,
        )


@contextlib.contextmanager
def warn_of_unaccounted_steps(model, budgets):
    """Context of a `fit`: says, once for an optimizer, that nobody asked what its steps cost.

    Args:
        model: Compiled Keras model with a private optimizer.
        budgets: Each `EpsilonCallback` of this `fit`.
    """
    optimizer = model.optimizer
    before = read_record(optimizer)["steps"]
    try:
        yield
    finally:
        steps = read_record(optimizer)["steps"] - before
        if steps > 0 and not budgets and not optimizer._private.is_reported:
            optimizer._private.is_reported = True
            warnings.warn(
                f"`fit` took {steps} private steps of model '{model.name}' without an "
                "EpsilonCallback, so nobody has said what they cost. Ask: "
                "`dice_tf.run_epsilon(model, sampling, delta)`. Or pass `fit` "
                "callbacks=[dice_tf.EpsilonCallback(sampling, delta)]. Arrays are accounted as "
                "`dice_tf.ShuffledEpochs`; of several trainings, choosing one costs the epsilon "
                "of all.",
                UnaccountedStepsWarning,
                stacklevel=4,
            )


class _BeginPass(keras.callbacks.Callback):
    # It has no methods for batches, so that nothing runs in another thread.
    async_safe = True

    def __init__(self, sampling, row_order):
        super().__init__()
        self._sampling, self._row_order = sampling, row_order

    def on_train_begin(self, logs=None):
        check_run(self.model.optimizer.mechanism, self._sampling, 0)
        self._has_begun = False

    def on_epoch_begin(self, epoch, logs=None):
        if not self._has_begun:
            # Not in `on_train_begin`, in which other callbacks load what they backed up.
            begin(self.model, self._sampling, self._row_order)
            self._has_begun = True
        elif self._sampling.whole_epochs:
            close_open_pass(self.model.optimizer, self._sampling)
        row_counts.begin_epoch(self.model.optimizer)

    def on_epoch_end(self, epoch, logs=None):
        optimizer = self.model.optimizer
        note_assignment(optimizer, self._sampling)
        if optimizer.built:
            row_counts.check(optimizer, self._sampling)


class _NotePass(keras.callbacks.Callback):
    """Records what a `fit` showed that nobody accounts, for a callback in a later one."""

    async_safe = True

    def __init__(self, shown):
        super().__init__()
        self._shown = shown

    def on_epoch_begin(self, epoch, logs=None):
        private_checkpoints.build_optimizer(self.model)
        optimizer = self.model.optimizer
        if optimizer.built:
            provenance.check_mechanism(optimizer.sampling_record, optimizer.mechanism)
        if not isinstance(self._shown, int):  # Then it is `ShuffledEpochs`.
            close_open_pass(self.model.optimizer, self._shown)
        row_counts.begin_epoch(self.model.optimizer)
        self._note()

    def on_epoch_end(self, epoch, logs=None):
        self._note()

    def _note(self):
        optimizer = self.model.optimizer
        _write_record(optimizer, provenance.join_sampling(read_record(optimizer), self._shown))


def _write_record(optimizer, fields):
    record = provenance.pack_record(fields)
    if optimizer.built:
        optimizer.sampling_record.assign(record)
    else:
        optimizer._private.first_record = record


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
            "`accounting.compute_epsilon`; if they came from a private checkpoint, whose draws "
            "repeat, as docs/saving.md has it for files that are loaded twice.",
            stacklevel=2,
        )


def _is_other_order(optimizer, row_order):
    return None not in (row_order, optimizer._private.row_order) and (
        row_order != optimizer._private.row_order
    )


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
    record = read_record(optimizer)
    missing = -(steps + record["unfinished_steps"]) % sampling.steps_per_round
    record["unfinished_steps"] += missing
    if sampling.num_groups > 1:
        other_groups = record["assignment"] != sampling.assignment
        if missing or other_groups or _is_other_order(optimizer, row_order):
            for error in optimizer.errors:
                error.assign(tf.zeros(error.shape))
        if missing:
            record["last_group"] = sampling.num_groups - 1
    record["assignment"] = sampling.assignment
    _write_record(optimizer, record)
