# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`EpsilonCallback`: epsilon next to the loss, and a stop before it exceeds a target."""

import copy
import types
from typing import Any

import tensorflow as tf

from dice_tf import accounting
from dice_tf.accounting import events
from dice_tf.accounting.epsilon import check_accountant, up
from dice_tf.checks.arguments import check_number
from dice_tf.errors import AccountingError, BudgetExhaustedError, SamplingError
from dice_tf.ledger import admission, claims, fit_data, provenance, runs
from dice_tf.ledger.sampling_passes import PassCallback
from dice_tf.sampling import Sampling
from dice_tf.training.run import private_optimizer

__all__ = ["EpsilonCallback"]

# Within one `fit`, epsilon is computed about this often between the ends of epochs: a
# value by PLD takes a noticeable part of a second.
_UPDATES_PER_FIT = {"rdp": 100, "pld": 10}


class EpsilonCallback(PassCallback):
    """Reports the privacy spent, enforces a budget and verifies how batches were drawn.

    Puts `epsilon` into the logs, so that the progress bar, `History`, `CSVLogger` and
    `TensorBoard` show it. At the end of an epoch it is exact; between, it is at most a
    hundredth of the training behind (with PLD, a tenth). `fit` calls it before all other
    callbacks, so that they find `epsilon` in the logs. The steps are those that the optimizer
    recorded, so a resumed run reports the whole run. A copy shares the sampler: in a search
    each trial has a copy, and an epsilon of its own.

    With `target_epsilon`, training stops before the step that would exceed it.

    What the sampling claims is checked against the batches that were trained on, see
    `docs/privacy.md`, section 5: a violation raises, after two steps in most cases. If an
    earlier `fit` was cut short within a pass over the data (a cycle of groups, or an
    epoch of `ShuffledEpochs`), or drew with another group assignment, the next one
    starts afresh: the steps that the pass lacks are counted as if they had been made,
    and cyclic sampling also sets the optimizer's error to 0, so that no example
    is in two overlapping windows.

    Args:
        sampling: The object whose `dataset` feeds `fit`; `ShuffledEpochs` for any
            other data that has each example once per epoch. Epochs of more than N rows are
            refused; see docs/privacy.md for what cannot be seen.
        delta: Float in (0, 1/N).
        target_epsilon: Float > 0, or `None` to train as long as `fit` says.
        accountant: `"rdp"` (fast) or `"pld"` (tighter).
        group_size: Int in [1, N]: epsilon and the budget are for people with up to so many
            examples.

    Raises:
        AccountingError: If an argument is out of range.

    Example:

    >>> from dice_tf.sampling import CyclicPoissonSampling
    >>> sampling = CyclicPoissonSampling(num_examples=60_000, expected_batch_size=2048)
    >>> callback = EpsilonCallback(sampling, delta=1e-5, target_epsilon=2.7)
    """

    # Keras may then run `on_train_batch_end` in another thread and need not wait for
    # each step to finish; that method only copies a number.
    async_safe = True

    def __init__(
        self,
        sampling: Sampling,
        delta: float,
        target_epsilon: float | None = None,
        accountant: str = "rdp",
        *,
        group_size: int = 1,
    ) -> None:
        events.check_sampling(sampling)
        super().__init__(sampling, [])
        self.sampling = sampling
        self.delta = events.check_delta(delta, sampling.num_examples)
        if target_epsilon is not None:
            target_epsilon = check_number("target_epsilon", target_epsilon, error=AccountingError)
        self.target_epsilon = target_epsilon
        check_accountant(accountant)
        self.accountant = accountant
        self.group_size = events.check_group_size(group_size, sampling.num_examples)
        self._spent, self._trained_by = {}, None
        self._epoch_is_one_pass, self._length = True, None

    def __deepcopy__(self, memo):
        """Returns a copy that asks the same sampler: `fit` draws from that very object."""
        duplicate = copy.copy(self)
        duplicate._spent, duplicate._sources = dict(self._spent), list(self._sources)
        return duplicate

    def set_model(self, model: Any) -> None:
        """Asks the optimizer of this model from now on."""
        super().set_model(model)
        self._trained_by = None

    def accounted_steps(self) -> int:
        """Returns the number of steps that epsilon counts.

        Returns:
            Int: the steps made so far, and those that passes lack that were cut short.
        """
        return runs.accounted_steps(self._own_model)

    def epsilon(self) -> float:
        """Returns the epsilon spent so far. Asking costs nothing and changes nothing.

        It is that of the optimizer which the last `fit` with this callback trained with, also
        if the model was compiled with another one since. In a loop of your own, call
        `set_model(model)` before, or `dice_tf.run_epsilon`.

        Returns:
            Float >= 0; infinite if `noise_multiplier` is 0.

        Raises:
            AccountingError: If there is no model yet.
            SamplingError: If the steps made so far contradict the sampling.
        """
        return self._epsilon_after(runs.accounted_run(self._own_model, self.sampling)[2])

    def statement(self) -> str:
        """Returns `dice_tf.run_statement`, the privacy statement of the steps made so far.

        Raises:
            AccountingError: If there is no model yet.
            SamplingError: If the steps made so far contradict the sampling.
        """
        return runs.run_statement(self._own_model, self.sampling, **self._terms)

    def note_data(self, x, found, steps_per_epoch):
        """Learns from `fit` what Keras tells no callback: the data, and where epochs end.

        Args:
            x: What `fit` received as `x`.
            found: List of the `admission.Source`s behind it.
            steps_per_epoch: What `fit` received so, or `None`.
        """
        self._sources, self._draw_counts = found, admission.draw_counts(found)
        length = fit_data.known_cardinality(x)
        self._epoch_is_one_pass = not isinstance(x, tf.distribute.DistributedDataset) and (
            steps_per_epoch in (None, length)
        )
        self._length = length if steps_per_epoch is None else None

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks the optimizer.

        Raises:
            PlainGradientsError: If the optimizer is not private.
            AccountingError: If optimizer and sampling have different batch sizes.
        """
        self._trained_by = self._optimizer
        self._cuts_short = False
        super().on_train_begin()

    def on_epoch_begin(self, epoch, logs=None):
        """Checks the claims and the budget, and takes the number of steps from the optimizer.

        Raises:
            SamplingError: If the data or the run so far contradicts the sampling.
            BudgetExhaustedError: If not one step is left in the budget.
        """
        super().on_epoch_begin(epoch)
        self._epoch = epoch
        self._count = self.accounted_steps()

    def _begin(self):
        if self.sampling.whole_epochs:
            self._check_steps_per_epoch()
        self._calls = self._batches = 0
        # Unlike `iterations`, this count does not go back when weights are loaded.
        self._steps_before = self._optimizer._private.steps_here()
        self._draws_before = self._draws()
        # Before the record says that this sampling draws the next steps.
        runs.accounted_run(self._own_model, self.sampling)
        super()._begin()

        self._count = self.accounted_steps()
        self._shown = self._epsilon_after(self._count)
        planned = self.params.get("epochs", 1) * (self.params.get("steps") or 0)
        updates = self.model.steps_per_execution * _UPDATES_PER_FIT[self.accountant]
        self._interval = max(1, planned // updates)
        self._allowed, self._limit_is_known = 0, False
        if self.target_epsilon is not None:
            self._search_limit(self._count + max(planned, 1))
            self._require(self._count + self._batches_of_call(0))

    def on_train_batch_begin(self, batch, logs=None):
        """Stops training if the step after this one is not affordable."""
        due = self._calls % self._interval == 0
        # The second batch: data that the sampling did not draw is refused early.
        if due or self._calls == 1:
            self._count = self._check_steps()
        batches = self._batches_of_call(batch)
        if self.target_epsilon is not None:
            following = batches + self._batches_of_call(batch + batches)
            if not self._allows(self._count + following):
                self._count = self.accounted_steps()
            self._require(self._count + batches)
            # Keras looks at `stop_training` only after the call that begins now.
            if not self._allows(self._count + following):
                self.model.stop_training = True
                self._cuts_short = not self._is_last(batch + batches)
        self._count += batches
        self._calls, self._batches = self._calls + 1, self._batches + batches
        if due:
            self._shown = self._epsilon_after(self._count)

    def on_train_batch_end(self, batch, logs=None):
        """Adds `epsilon` to the logs of the batch."""
        if logs is not None:
            logs["epsilon"] = self._shown

    def on_epoch_end(self, epoch, logs=None):
        """Adds the exact `epsilon` to the logs of the epoch, and verifies the claim."""
        self._check_steps()
        if self._batches and self._optimizer._private.steps_here() == self._steps_before:
            raise SamplingError(
                f"This `fit` trained on {self._batches} batches, but the optimizer of model "
                f"'{self.model.name}' made no step: something else trains it, and epsilon would "
                "leave that out. Compile the model with the optimizer that trains it."
            )
        super().on_epoch_end(epoch, logs)
        self._shown = self.epsilon()
        if logs is not None:
            logs["epsilon"] = self._shown

    def on_train_end(self, logs=None):
        """Says so, unless `verbose=0`, if the budget ended training before `fit` would have."""
        if self._cuts_short and self.params.get("verbose"):
            print(
                f"EpsilonCallback ended training after {self.accounted_steps()} steps at "
                f"epsilon={up(self.epsilon())}: more would exceed "
                f"target_epsilon={self.target_epsilon:g}.",
                flush=True,
            )

    @property
    def _own_model(self) -> Any:
        if self.model is None:
            raise AccountingError(
                "This EpsilonCallback has no model yet, whose steps it could count. Ask it after "
                "`fit`, or call `set_model(model)` before."
            )
        if self._trained_by not in (None, self.model.optimizer):
            # Compiled anew since; the new optimizer does not know of the old one's steps.
            return types.SimpleNamespace(optimizer=self._trained_by, name=self.model.name)
        return self.model

    @property
    def _terms(self) -> dict[str, Any]:
        """By what epsilon is computed."""
        return dict(delta=self.delta, accountant=self.accountant, group_size=self.group_size)

    @property
    def _optimizer(self):
        return private_optimizer(self._own_model, runs.NEED)

    def _epsilon_after(self, steps):
        mechanism = self._optimizer.mechanism
        # With bounded residuals the cost depends on the rounds alone.
        rounds = tuple(self.sampling.accounted_rounds(1.0, steps))
        cost = steps if events.is_unbounded(mechanism) else rounds
        if (mechanism, cost) not in self._spent:
            epsilon = accounting.compute_epsilon(mechanism, self.sampling, steps, **self._terms)
            self._spent[mechanism, cost] = epsilon
        return self._spent[mechanism, cost]

    def _allows(self, steps):
        while steps > self._allowed and not self._limit_is_known:
            self._search_limit(2 * steps)
        return steps <= self._allowed

    def _search_limit(self, steps):
        """Finds that `steps` are affordable, or else the largest number that is."""
        assert self.target_epsilon is not None  # For type checkers: all callers know.
        if self._epsilon_after(steps) <= self.target_epsilon:
            self._allowed = steps
            return
        self._limit_is_known = True
        if self._epsilon_after(1) <= self.target_epsilon:
            mechanism, sampling = self.model.optimizer.mechanism, self.sampling
            self._allowed = accounting.calibrate_steps(
                self.target_epsilon, mechanism=mechanism, sampling=sampling, **self._terms
            )

    def _require(self, steps):
        if not self._allows(steps):
            raise BudgetExhaustedError(
                f"The privacy budget target_epsilon={self.target_epsilon} at delta={self.delta} "
                f"allows {self._allowed} steps, of which {self.accounted_steps()} are spent "
                f"(epsilon={up(self.epsilon())}); the next call of the train function would make "
                f"it {steps} (epsilon={up(self._epsilon_after(steps))}). Keep the model as it is, "
                "or start again with a larger `noise_multiplier`. Raising `target_epsilon` is a "
                "decision about the privacy of the people in the data."
            )

    def _batches_of_call(self, batch):
        """Returns how many batches a call of the train function takes that begins at `batch`."""
        steps, most = self.params.get("steps"), self.model.steps_per_execution
        return most if steps is None else min(most, steps - batch % steps)

    def _is_last(self, batches):
        """Returns whether `fit` itself ends when this epoch has taken so many batches."""
        epochs, steps = self.params.get("epochs", 1), self.params.get("steps")
        return self._epoch + 1 == epochs and batches == steps

    def _check_steps(self):
        """Returns the steps that epsilon counts, of which those of this `fit` had batches."""
        steps = claims.check_steps(self._optimizer, self.sampling)
        taken = self._optimizer._private.steps_here() - self._steps_before
        drawn = self._draws()
        fresh = self._batches if drawn is None else min(self._batches, drawn - self._draws_before)
        if taken > fresh:
            if self._sources:
                provenance.note_reused_draws(self._optimizer, taken - fresh)
            raise SamplingError(
                f"Cannot account the run by {self.sampling!r}: this `fit` made {taken} steps, but "
                f"had only {fresh} batches that were drawn for it. Pass the callback the very "
                "object whose `dataset` feeds `fit`, do not `cache()` that data set, and take one "
                "private step per batch: every step must have a batch of its own."
            )
        return steps

    def _draws(self) -> Any:
        """Returns the number of batches drawn so far by what `fit` trains on, if that is known."""
        if self._sources:
            return sum(map(sum, self._draw_counts))
        return self.sampling.draws if self.sampling.amplified else None

    def _check_steps_per_epoch(self):
        steps, declared = self.params.get("steps"), self.sampling.steps_per_epoch
        # Keras may limit the steps of an epoch, `keras.config.set_max_steps_per_epoch`.
        if steps != declared or self._length not in (None, steps):
            raise SamplingError(
                f"`fit` takes {steps or 'an unknown number of'} steps per epoch"
                f"{f' of {self._length} batches' if self._length else ''}, but "
                f"{self.sampling!r} visits every example once in {declared} steps of "
                f"{self.sampling.expected_batch_size} examples. Declare the true `num_examples`, "
                f"pass batch_size={self.sampling.expected_batch_size} to `fit` or batch the data "
                "set so, without `repeat`, `take` or `drop_remainder`, and let its cardinality be "
                "known."
            )
        if not self._epoch_is_one_pass:
            raise SamplingError(
                "Nobody can tell that an epoch of this `fit` is one pass over the data, as "
                f"{self.sampling!r} has it. Leave `steps_per_epoch` and `repeat` out, and pass "
                "arrays or a `tf.data.Dataset` that knows its length, not yet distributed."
            )
