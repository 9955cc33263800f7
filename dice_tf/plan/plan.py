# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`PrivacyPlan`: all that is public about a private training, decided before its first step."""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any

import keras
import tensorflow as tf

from dice_tf import accounting
from dice_tf.accounting.epsilon import check_accountant
from dice_tf.accounting.events import check_delta, check_group_size
from dice_tf.checks.arguments import check_integer, check_number
from dice_tf.errors import AccountingError, MechanismError, SamplingError
from dice_tf.ledger import runs
from dice_tf.mechanism import PRIVACY_ARGUMENTS, DiceMechanism, PiecewiseSchedule, clip_rules
from dice_tf.mechanism.clipping import Clip
from dice_tf.mechanism.schedules import schedule_of
from dice_tf.plan import choices, report
from dice_tf.plan.callback import PlanCallback
from dice_tf.sampling import CyclicPoissonSampling, PoissonSampling, Sampling
from dice_tf.training.epsilon_callback import EpsilonCallback
from dice_tf.training.optimizer_arguments import same_value

__all__ = ["PrivacyPlan"]


@dataclasses.dataclass(frozen=True, init=False)
class PrivacyPlan:
    r"""Everything that decides the privacy of a training, said once.

    The plan makes the sampler, the privacy arguments of the optimizer, the callback and the
    statement, so that they cannot contradict each other. They are the objects that one can
    make by hand as well; the plan adds nothing to them. `print(plan)` shows what it chose and
    what that costs.

    One epsilon for one run: calibration, progress bar, budget and statement are by the plan's
    `accountant`. The statement has the epsilon of the other one beside it.

    What is left out is chosen so. `feedback_steps` and the share of \(C_1\) in the total
    threshold \(G = C_1 + C_2\), by the number of steps: 7 and 0.3 from 700 steps on, 3 and 0.5
    from 350, 1 and 0.5 from 200, below that 0, which is DP-SGD; fewer where the data are too
    few for s + 1 groups of a batch, or where that would not take less noise than DP-SGD that
    clips to G, because a batch is a large part of the data. `delta` is a tenth of 1/N.

    \(C_1\) is `l2_norm_clip` of the optimizer, the one threshold to tune; the plan makes
    \(C_2\) = `error_norm_clip_ratio` \(\cdot\, C_1\) of it. Epsilon depends on the ratio alone.

    Args:
        num_examples: Int, the size N of the training data (without a validation split).
        batch_size: Int, the expected number B of examples in a batch.
        epochs: Int >= 1. An epoch is `sampling.steps_per_epoch` steps, whole cycles of groups,
            so some examples come twice in it and some not at all.
        target_epsilon: Float > 0: the noise is calibrated so that all epochs just fit, and the
            callback stops before it is passed. Or give `noise_multiplier`.
        noise_multiplier: Float >= 0, noise on the sum of clipped gradients over `l2_norm_clip`.
        delta: Float in (0, 1/N). Defaults to 0.1/N.
        accountant: `"pld"` (tight) or `"rdp"`.
        feedback_steps: Int >= 0, over how many steps a residual is fed back, by a sampler
            of one group more. 0 is DP-SGD.
        error_norm_clip_ratio: Float >= 0, \(C_2 / C_1\).
        sampling: How batches are drawn, if not by `CyclicPoissonSampling` (`PoissonSampling`
            for DP-SGD); then it says `num_examples` and `batch_size`. Feedback pays with
            cyclic sampling only, so with others `feedback_steps` defaults to 0. If it is one
            `of_owners`, the plan is about owners.
        views: Int >= 1, how many views of each row are clipped as one, see `dataset`. They
            cost no epsilon.
        clipping: The rule of clipping. `"adaptive"` and `AdaptiveClipping` cost noise, so they
            must be given here; all others may as well be given to the optimizer.
        schedule: `PiecewiseSchedule` of noise and thresholds, or `None`.
        group_size: Int in [1, N]: target, budget and `epsilon` are for people with up to so many
            examples.

    Raises:
        MechanismError: If arguments are missing or contradict each other.
        SamplingError: If there are not enough examples for the batches.
        AccountingError: If an argument is out of range, or no noise is enough.

    Example:

    >>> plan = PrivacyPlan(num_examples=60_000, batch_size=2048, epochs=20, target_epsilon=3.0)
    >>> plan.steps, plan.sampling.num_groups, round(plan.noise_multiplier, 2)
    (600, 2, 2.84)
    >>> 2.99 < plan.epsilon() <= 3.0
    True
    >>> import dice_tf
    >>> optimizer = dice_tf.DiceSGDOptimizer(learning_rate=1.0, l2_norm_clip=0.25, plan=plan)
    >>> optimizer.expected_batch_size, optimizer.error_norm_clip, optimizer.feedback_steps
    (2048, 0.25, 1)
    """

    num_examples: int
    batch_size: int
    epochs: int
    target_epsilon: float | None
    noise_multiplier: float
    delta: float
    accountant: str
    feedback_steps: int
    error_norm_clip_ratio: float
    sampling: Sampling
    views: int
    clipping: str | Clip
    schedule: PiecewiseSchedule | None
    group_size: int
    _why: dict[str, str] = dataclasses.field(init=False, repr=False, compare=False)

    def __init__(
        self,
        *,
        epochs: int,
        num_examples: int | None = None,
        batch_size: int | None = None,
        target_epsilon: float | None = None,
        noise_multiplier: float | None = None,
        delta: float | None = None,
        accountant: str = "pld",
        feedback_steps: int | None = None,
        error_norm_clip_ratio: float | None = None,
        sampling: Sampling | None = None,
        views: int = 1,
        clipping: str | Clip = "flat",
        schedule: PiecewiseSchedule | None = None,
        group_size: int = 1,
    ) -> None:
        store = functools.partial(object.__setattr__, self)
        store("clipping", clip_rules.canonical(clipping))
        store("views", check_integer("views", views, error=SamplingError))
        store("epochs", check_integer("epochs", epochs, error=AccountingError))
        check_accountant(accountant)
        store("accountant", accountant)
        if (target_epsilon is None) == (noise_multiplier is None):
            raise MechanismError(
                "A plan needs one of `target_epsilon`, from which the noise follows, and "
                "`noise_multiplier`, from which epsilon follows, and not both. Received: "
                f"target_epsilon={target_epsilon!r}, noise_multiplier={noise_multiplier!r}."
            )
        num_examples, batch_size = choices.sizes(num_examples, batch_size, sampling)
        store("group_size", check_group_size(group_size, num_examples))
        store("schedule", schedule_of(schedule))
        store("num_examples", num_examples)
        store("batch_size", batch_size)
        # What `print` says about values that were not given.
        store("_why", {} if delta is not None else {"delta": "a tenth of 1/N"})
        delta = 0.1 / num_examples if delta is None else delta
        store("delta", check_delta(delta, num_examples))
        ratio = error_norm_clip_ratio
        if ratio is not None:
            ratio = check_number("error_norm_clip_ratio", ratio, exclusive=False)
        if target_epsilon is not None:
            target_epsilon = check_number("target_epsilon", target_epsilon, error=AccountingError)
        if feedback_steps is None:
            target = 2.0 if target_epsilon is None else target_epsilon
            feedback_steps, why = choices.feedback_steps_and_reason(self, ratio, sampling, target)
            if ratio and not feedback_steps:
                feedback_steps, why = 1, "as error_norm_clip_ratio is above 0"
            self._why["feedback_steps"] = why
        feedback_steps = check_integer("feedback_steps", feedback_steps, minimum=0)
        if ratio is None:
            ratio = choices.error_norm_clip_ratio(feedback_steps)
        if (ratio == 0) != (feedback_steps == 0):
            raise MechanismError(
                "Arguments `feedback_steps` and `error_norm_clip_ratio` must both be 0, which is "
                f"DP-SGD, or both be above 0. Received: feedback_steps={feedback_steps}, "
                f"error_norm_clip_ratio={ratio}. Leave one of them out."
            )
        store("feedback_steps", feedback_steps)
        store("error_norm_clip_ratio", ratio)
        store("sampling", self._make_sampling() if sampling is None else sampling)
        if target_epsilon is None:
            noise_multiplier = check_number("noise_multiplier", noise_multiplier, exclusive=False)
        else:
            noise_multiplier = accounting.calibrate_noise_multiplier(
                target_epsilon,
                self.delta,
                self.sampling,
                self.steps,
                error_norm_clip=ratio,
                feedback_steps=max(1, feedback_steps),
                accountant=accountant,
                clipping=self.clipping,
                schedule=self.schedule,
                group_size=self.group_size,
            )
        store("target_epsilon", target_epsilon)
        store("noise_multiplier", noise_multiplier)

    def _make_sampling(self) -> Sampling:
        groups = self.feedback_steps + 1
        if groups == 1:
            return PoissonSampling(self.num_examples, self.batch_size)
        if groups * self.batch_size > self.num_examples:
            raise SamplingError(
                f"Argument `feedback_steps` needs {groups} groups of at least `batch_size` "
                f"examples. Received: feedback_steps={self.feedback_steps}, "
                f"batch_size={self.batch_size}, num_examples={self.num_examples}. Leave "
                f"`feedback_steps` out, or take batches of {self.num_examples // groups} at "
                "most."
            )
        return CyclicPoissonSampling(self.num_examples, self.batch_size, groups)

    @property
    def steps(self) -> int:
        """Int, number of optimizer steps in all epochs."""
        return int(self.sampling.steps(self.epochs))

    def mechanism(
        self,
        l2_norm_clip: float | None = 1.0,
        clipping: str | Clip | None = None,
        noise_is_secret: bool = True,
    ) -> DiceMechanism:
        """Returns the parameters of an optimizer that follows this plan.

        Args:
            l2_norm_clip: Float, the threshold C1. Epsilon does not depend on it.
            clipping: `None` for that of the plan. Or another rule of the same epsilon: `"flat"`;
                `"automatic"`, whose thresholds are 1; `"per_layer"` or a `PerLayerClipping`.
            noise_is_secret: Whether the noise key does not come from a seed.

        Returns:
            `DiceMechanism`.

        Raises:
            MechanismError: If `l2_norm_clip` is missing or out of range, clipping is
                automatic and `error_norm_clip_ratio` neither 0 nor 1, or it is adaptive and not
                that of the plan.
        """
        rule: str | Clip = self.clipping if clipping is None else clip_rules.canonical(clipping)
        names = {clip_rules.rule_of(one).name for one in (rule, self.clipping)}
        if rule != self.clipping and "adaptive" in names:
            raise MechanismError(
                "Adaptive thresholds cost noise, so they must be those that the plan was "
                f"calibrated with. Received: clipping={rule!r} (plan: {self.clipping!r}). Give "
                "`clipping` to the plan, and leave it out of the optimizer."
            )
        if rule == "automatic" and self.error_norm_clip_ratio not in (0.0, 1.0):
            raise MechanismError(
                'With clipping="automatic" both thresholds are 1, or the second is 0, so the plan '
                "must have error_norm_clip_ratio=1, or 0 for no error feedback. Received: "
                f"error_norm_clip_ratio={self.error_norm_clip_ratio:g}. Make the plan with it."
            )
        unit = 1.0 if l2_norm_clip is None else check_number("l2_norm_clip", l2_norm_clip)
        # `None` is for `DiceMechanism` to judge.
        threshold: Any = l2_norm_clip
        return DiceMechanism(
            l2_norm_clip=threshold,
            error_norm_clip=self.error_norm_clip_ratio * unit,
            noise_multiplier=self.noise_multiplier,
            expected_batch_size=self.batch_size,
            feedback_steps=max(1, self.feedback_steps),
            rows_per_unit=self.views * self.sampling.rows_per_unit,
            clipping=rule,
            schedule=self.schedule,
            noise_is_secret=noise_is_secret,
        )

    def dataset(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        augment: Callable[[Any], Any] | None = None,
    ) -> tf.data.Dataset:
        """Returns the batches for `fit`: one iteration is one epoch, with `views` of each row.

        Args:
            x: As for `sampling.dataset`, like all others.
            y: Targets, or `None`.
            sample_weight: Weights of the rows, or `None`.
            augment: Function that makes a view of each row, or `None`.

        Returns:
            `tf.data.Dataset`. Under a `tf.distribute` strategy, call this in its scope.
        """
        return self.sampling.dataset(
            x, y, sample_weight, self.epochs, views=self.views, augment=augment
        )

    def callback(self) -> EpsilonCallback:
        """Returns an `EpsilonCallback` with the budget and the accountant of this plan.

        Before the first step it also refuses an optimizer with other privacy arguments, and
        warns if the noise drowns the signal in a model of that size.
        """
        return PlanCallback(self)

    def epsilon(self, steps: int | None = None) -> float:
        """Returns epsilon by the accountant of the plan.

        Args:
            steps: Int >= 0, number of optimizer steps. Defaults to all.

        Returns:
            Float >= 0, infinite without noise.
        """
        run = self.mechanism(), self.sampling, self.steps if steps is None else steps
        return accounting.compute_epsilon(
            *run, self.delta, self.accountant, group_size=self.group_size
        )

    def statement(self, model: keras.Model) -> str:
        """Returns the privacy statement of the steps that were made on `model`.

        Args:
            model: Model that was trained by this plan, and still has its optimizer.

        Returns:
            Text, that of `accounting.privacy_statement`.

        Raises:
            PlainGradientsError: If the optimizer is not private.
            MechanismError: If its privacy arguments are not those of this plan.
            SamplingError: If its steps contradict the sampling.
        """
        runs.accounted_steps(model)
        self.check_follows(model)
        return runs.run_statement(
            model, self.sampling, self.delta, self.accountant, group_size=self.group_size
        )

    def check_follows(self, model: keras.Model) -> None:
        """Refuses a model whose optimizer has other privacy arguments than this plan.

        Args:
            model: Model that is compiled with a private optimizer.

        Raises:
            MechanismError: If it does.
        """
        actual = model.optimizer.mechanism
        planned = self.mechanism(actual.l2_norm_clip, actual.clipping, actual.noise_is_secret)
        different = [
            f"{name}={getattr(actual, name)!r} (plan: {getattr(planned, name)!r})"
            for name in PRIVACY_ARGUMENTS
            if not same_value(getattr(actual, name), getattr(planned, name))
        ]
        if different:
            raise MechanismError(
                f"The optimizer of model '{model.name}' does not follow this plan. Received: "
                f"{', '.join(different)}. Compile the model with an optimizer that was made with "
                "`plan=plan`, or use the plan that it was made with."
            )

    def signal_to_noise(self, num_parameters: int) -> float:
        r"""Returns how long the signal can be against the noise, over the whole training.

        The mean of clipped gradients is at most \(C_1 + C_2\) long. In T steps that all point
        the same way, signals add up to \(T (C_1 + C_2)\). The noise, of standard deviation
        \(\sigma_1 = z C_1 / B\) per coordinate, adds up to a length of \(\sigma_1 \sqrt{T d}\)
        in d parameters:

        \[\mathrm{SNR}(d) = \sqrt{\frac Td}\,\frac{C_1 + C_2}{\sigma_1}
          = \sqrt{\frac Td}\,\frac{B\,(1 + C_2/C_1)}{z}.\]

        With a schedule or adaptive thresholds \(\sigma_1\) is that of factors of 1.

        Below 1 the noise in the weights is longer than the longest possible signal, whatever
        the learning rate and the thresholds. Above 1 all may still be in vain: real
        gradients neither agree nor reach the threshold.

        Args:
            num_parameters: Int >= 1, number of trainable parameters d.

        Returns:
            Float > 0, infinite without noise.

        Source: \(B \sqrt T / z\) is, up to constants and N, the inverse of the total amount of
        noise in Sander, Stock, Sablayrolles, "TAN without a burn", ICML 2023.
        """
        parameters = check_integer("num_parameters", num_parameters, error=AccountingError)
        if self.noise_multiplier == 0:
            return math.inf
        of_a_step = self.batch_size * (1 + self.error_norm_clip_ratio) / self.noise_multiplier
        return math.sqrt(self.steps / parameters) * of_a_step

    def __str__(self) -> str:
        return report.report(self, self._why)
