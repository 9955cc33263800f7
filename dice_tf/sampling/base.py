# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""How examples are drawn, and what that draw is worth to the accountant.

One object says both, so that the batches that are trained on and the sampling that
epsilon assumes cannot differ. A new sampler is one class that defines its draws
(`draw_plan`) and their price (`accounted_rounds`). \(N\) = `num_examples`,
\(B\) = `expected_batch_size`, \(m\) = `num_groups`, \(T\) = number of steps.
"""

import abc
from collections.abc import Callable
import dataclasses
import functools
import secrets
from typing import TYPE_CHECKING, Any, ClassVar, cast
import warnings

import numpy as np
import tensorflow as tf

from dice_tf.accounting.events import Rounds, is_unbounded
from dice_tf.checks.arguments import check_integer
from dice_tf.errors import AccountingError, SamplingError
from dice_tf.mechanism import DiceMechanism
from dice_tf.sampling import batches
from dice_tf.sampling.owners import OfOwners, Owners
from dice_tf.sampling.state import SamplingState, renewed_in_forks

__all__ = ["Sampling"]

# Independent streams derived from one seed.
_ASSIGNMENT_STREAM, DRAW_STREAM = range(2)

# What `draw_plan` returns.
DrawPlan = tuple[Callable[[], np.ndarray], Callable[..., tuple[np.ndarray, ...]], int | None]


@dataclasses.dataclass(frozen=True)
class Sampling(OfOwners, abc.ABC):
    """What every way of drawing batches has in common; use one of its subclasses.

    A new one is a frozen dataclass that defines `own_coins`, `draw_plan`, `accounted_rounds` and
    `description`. All else follows from these: data sets, epsilon, calibration, statement.

    A class is accounted only if it defines `accounted_rounds` itself. A derived class may draw in
    another way, so it does not inherit the price of its parent.

    Args:
        num_examples: Int >= 1, the size N of the data set. It is declared, never taken
            from a data loader, because the guarantee depends on it.
        expected_batch_size: Int >= 1, the mean number B of examples in a batch.
        owners: `Owners` of rows, or `None`. With owners, every word about examples is about
            owners: N and B count them, and whole ones are drawn. Use `of_owners`.

    Raises:
        SamplingError: If a value is out of range or values contradict each other.

    Example: exactly B examples at every step, all of them full releases.

    >>> from dice_tf import accounting, mechanism, sampling
    >>> @dataclasses.dataclass(frozen=True)
    ... class FixedSize(sampling.Sampling):
    ...     seed: int | None = None
    ...     own_coins = False
    ...     def draw_plan(self, planned_steps, replicas=1):
    ...         size = self.expected_batch_size
    ...         pick = lambda pool, rng, epoch, cycle: rng.choice(pool, size, replace=False)
    ...         return sampling.padded_draws(self, pick, planned_steps, replicas)
    ...     def accounted_rounds(self, noise_multiplier, steps):
    ...         return [accounting.Round(1.0, noise_multiplier, steps)]
    ...     def description(self, steps):
    ...         return f"Every step of {steps} draws {self.expected_batch_size} examples."
    >>> dp_sgd = mechanism.DiceMechanism(
    ...     l2_norm_clip=1.0, error_norm_clip=0.0, noise_multiplier=40.0, expected_batch_size=500)
    >>> round(accounting.compute_epsilon(dp_sgd, FixedSize(10_000, 500), steps=100, delta=1e-5), 2)
    1.01

    Source: own; the price is for the class to prove, as in `docs/privacy.md`, section 2.
    """

    num_examples: int
    expected_batch_size: int
    owners: Owners | None = dataclasses.field(default=None, kw_only=True, repr=False)

    if TYPE_CHECKING:
        # None of the fields.
        _state: SamplingState = dataclasses.field(init=False)

    num_groups = 1
    seed = cast("int | None", None)  # With an annotation it would be a field before all others.
    # Whether epsilon is of batches that this very object is seen to draw. If not, it is of any
    # data that shows each example once per epoch.
    amplified = True
    # Whether an example takes part once in every epoch, so that `fit` must show whole ones.
    whole_epochs = False
    # Whether a run costs what its rounds of `steps_per_round` steps cost, composed, each at a noise
    # of its own: `accounted_rounds` of n of them, whichever they are. A schedule needs it. The
    # class that defines `accounted_rounds` says so itself.
    rounds_add_up = False

    def __post_init__(self):
        for name in ("num_examples", "expected_batch_size", "num_groups"):
            value = check_integer(name, getattr(self, name), error=SamplingError)
            if name in self.__dataclass_fields__:
                object.__setattr__(self, name, value)
        seed = self.seed
        if seed is not None:
            seed = check_integer("seed", seed, minimum=0, error=SamplingError)
            object.__setattr__(self, "seed", seed)
        if self.num_groups * self.expected_batch_size > self.num_examples:
            raise SamplingError(
                "Arguments `expected_batch_size` times `num_groups` must not exceed "
                "`num_examples`: an example would be drawn with a probability above 1. Received: "
                f"expected_batch_size={self.expected_batch_size}, num_groups={self.num_groups}, "
                f"num_examples={self.num_examples}."
            )
        if self.owners is not None and self.owners.count != self.num_examples:
            raise SamplingError(
                "With `owners`, `num_examples` is the number of owners. Received: "
                f"num_examples={self.num_examples} with {self.owners.count} owners. Use "
                f"`{type(self).__name__}.of_owners(owner_ids, ...)`, which counts them."
            )
        entropy = secrets.randbits(128) if seed is None else seed
        # Not a field: two objects with equal parameters are equal and account alike.
        object.__setattr__(self, "_state", SamplingState(entropy))
        if seed is None:
            renewed_in_forks.add(self._state)

    # Callbacks are copied, and the batches counted for the object itself; nothing else changes.
    __copy__ = lambda self: self
    __deepcopy__ = lambda self, memo: self

    def __reduce__(self):
        # Another process draws for itself: with the same entropy it would draw the same batches.
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return functools.partial(type(self), **fields), ()

    if TYPE_CHECKING:
        own_coins: ClassVar[bool]
    else:

        @property
        @abc.abstractmethod
        def own_coins(self) -> bool:
            """Whether examples take part by coins of their own, whatever others there are.

            Then an example can be added or removed. If not, one more would move others to other
            batches, and the guarantee is for an example that is replaced by an empty one.
            """

    @abc.abstractmethod
    def draw_plan(self, planned_steps: int, replicas: int = 1) -> DrawPlan:
        """Returns how batches are drawn; `padding.padded_draws` makes one from a single function.

        Args:
            planned_steps: Int >= 1, for how many steps padded sizes should do.
            replicas: Int >= 1; numbers of rows are multiples of it.

        Returns:
            `begin`, `draw` and the number of rows of every batch (`None`: it varies). `begin()`
            gives the int64 vector that identifies one iteration; `draw(iteration, step)` the
            int64 row indices and float32 weights (1 drawn, 0 padding) of one batch.
        """

    @abc.abstractmethod
    def accounted_rounds(self, noise_multiplier: float, steps: int) -> Rounds:
        """Returns the price of these draws, which the class that defines it has a proof for.

        Args:
            noise_multiplier: Float > 0, noise over what one entry of an example moves, its
                residuals included: in quadrature where `separates_entries`, else their sum.
            steps: Int >= 0, number of optimizer steps.

        Returns:
            `accounting.Round`s whose adaptive composition is no less distinguishable, in both
            directions, than the run with an example and without. Those of one epoch say whether
            there is any amplification. Numbers of steps that have equal rounds at one noise must
            have them at all: `EpsilonCallback` computes epsilon once for them.
        """

    @abc.abstractmethod
    def description(self, steps: int) -> str:
        """Returns what the statement says about the draws of `steps` steps and their price."""

    def check_mechanism(self, mechanism: DiceMechanism) -> None:
        """Refuses a mechanism for which the price is not proven.

        Unless a class says otherwise, that is one with unbounded residuals, whose error moves
        whether its example is drawn or not, or with microbatches, which an example shares.

        Args:
            mechanism: `DiceMechanism` of the run.

        Raises:
            AccountingError: If it is such a one.
        """
        if is_unbounded(mechanism) or mechanism.num_microbatches is not None:
            raise AccountingError(
                f"`{type(self).__name__}` is accounted with bounded residuals of single examples. "
                f"Received: bound_residuals={mechanism.bound_residuals!r}, "
                f"num_microbatches={mechanism.num_microbatches}. Leave both arguments out, or draw "
                "by `CyclicPoissonSampling`."
            )

    @property
    def sampling_probability(self) -> float:
        """Probability with which a member of the active group is drawn at a step."""
        return self.num_groups * self.expected_batch_size / self.num_examples

    @property
    def steps_per_epoch(self) -> int:
        """Int, number of batches in one iteration of `dataset`."""
        cycles = round(self.num_examples / (self.num_groups * self.expected_batch_size))
        return self.num_groups * max(1, cycles)

    @property
    def steps_per_round(self) -> int:
        """Int, the steps of a cycle of groups or, with `whole_epochs`, of an epoch.

        An example can take part in one of them at most once.
        """
        return self.steps_per_epoch if self.whole_epochs else self.num_groups

    @property
    def draws(self) -> int:
        """Int, number of batches that this object has drawn so far, over all data sets."""
        return self._state.draws

    @property
    def assignment(self) -> int:
        """Int >= 0, a public random name of this object's assignment of examples to groups."""
        return self._state.assignment

    @property
    def entropy(self) -> int:
        """Int, all that draws depend on besides their number: as secret as the draws."""
        return self._state.entropy

    @property
    def position(self) -> int:
        """Int, number of steps from the first draw to the first of the next iteration."""
        return self._state.iterations * self.steps_per_epoch + self._state.offset

    def move_to(self, entropy, assignment, position):
        """Takes over the draws of an equal object; the next iteration begins at `position`.

        Args:
            entropy: Int, `entropy` of that object.
            assignment: Int, `assignment` of that object.
            position: Int >= 0, in steps.

        Returns:
            Whether it does: `ShuffledEpochs` begins the next whole epoch, and no object goes
            back to draws that it has made, which another model may have used.
        """
        entropy = entropy if self.seed is None else self.seed
        place = divmod(position, self.steps_per_epoch)
        if not self._state.move_to(entropy, assignment, *place):
            self.start_whole_pass()
            warnings.warn(
                f"This sampling object has made the draws from step {position} on before, and "
                "makes none twice, because another model may have used them. Training goes on with "
                "fresh draws: as private, but not bit for bit as the file has it. For that, load "
                f"the file with a new object. Received: {self!r} at step {self.position}.",
                stacklevel=3,
            )
            return False
        if self._state.offset and self.whole_epochs:
            self.start_whole_pass()
        return self.position == position

    def start_whole_pass(self):
        """Begins the next iteration at the start of a pass over the data, and numbers it."""
        self._state.start_whole_pass()

    def watch(self, on_gap):
        """Calls `on_gap`, once, when a draw is left out: when an iteration is given up.

        The number of steps made then tells no longer which draws were used, and a run that
        resumed by it would use some a second time.
        """
        self._state.watch(self.position, on_gap)

    def steps(self, epochs: int) -> int:
        """Returns the number of steps in `epochs` epochs.

        Args:
            epochs: Int >= 0.

        Returns:
            Int, `epochs * steps_per_epoch`.
        """
        return self.steps_per_epoch * check_integer(
            "epochs", epochs, minimum=0, error=SamplingError
        )

    def rounds(self, steps: int) -> int:
        """Returns the largest number of steps, out of `steps`, that one example can enter.

        Args:
            steps: Int >= 0, number of optimizer steps.

        Returns:
            Int, `steps / steps_per_round`, rounded up.
        """
        steps = check_integer("steps", steps, minimum=0, error=SamplingError)
        return -(-steps // self.steps_per_round)

    def separates_entries(self, feedback_steps: int) -> bool:
        """Returns whether two entries of an example are always over `feedback_steps` apart."""
        return self.num_groups > feedback_steps

    def dataset(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        planned_epochs: int = 1,
        *,
        views: int = 1,
        augment: Callable[[Any], Any] | None = None,
    ) -> tf.data.Dataset:
        r"""Returns the `tf.data.Dataset` of batches that `fit` trains on.

        Every iteration, and every step of it, is a fresh draw; nothing is cached, and
        the result must not be (`cache()` would train on the first draw over and
        over; `EpsilonCallback` notices). `map`, `prefetch` and `repeat` are fine.

        Batches come in few shapes, so that a step compiled for a shape is reused: rows that
        were not drawn are added, with `sample_weight` 0, up to the next padded size. Keep the
        weights: without them these rows train. The smallest size holds every draw of a run of
        `planned_epochs` epochs with probability 0.9 at least; a larger draw takes a size 25 %,
        50 %, ... larger. A draw is never cut. One iteration is one epoch, whatever is planned:
        `fit(data, epochs=3)` and a loop over `data.repeat(3)` make three, more are allowed.

        Under a `tf.distribute` strategy, call this within `strategy.scope()`: padded sizes
        are then multiples of the number of replicas. All workers of a cluster draw the
        same batches, from entropy of the first one, and each takes its shard of them.

        Args:
            x: Features: an array or tensor with `num_rows` rows, a dictionary or tuple
                of them, or a random-access source of elements, such as
                `tfds.data_source(...)` or a list of `(features, label)` pairs. A source of
                other elements gives batches `(element, None, weights)`, to be mapped
                to `(x, y, weights)`. Float64 becomes the Keras default float type.
            y: Targets, arrays of the same kind, or `None`. Keras trains on `y=None`
                only if the model brings its own loss (`add_loss`, `compute_loss`); an
                autoencoder passes `y=x`.
            sample_weight: Finite weights >= 0, shape `[num_rows]`, or a dictionary or
                tuple of them for several outputs. `None` means 1, for all or for one output.
            planned_epochs: Int >= 1, for how many epochs it will be used; only the padded size
                depends on it.
            views: Int K >= 1, how often each drawn row is shown, one view after the other. They
                are clipped as one, by an optimizer with `rows_per_unit=K` (times
                `rows_per_owner`), at no cost in epsilon.
            augment: Function of features `[rows, ...]`, such as a Keras preprocessing layer or
                random operations of TensorFlow, called afresh for each view. It must make each
                row from that row alone; one that is seen to mix them is refused.

        Returns:
            Dataset of `(x, y, sample_weight)` with `steps_per_epoch` elements. Tensors
            have a leading dimension of the batch; `sample_weight` is float32.

        Raises:
            SamplingError: If the data contradicts `num_rows`, has no random access, `views` is
                below 1, `augment` mixes rows or returns other than features, or if several
                workers would draw different batches.

        Example:

        >>> from dice_tf.sampling import PoissonSampling
        >>> sampling = PoissonSampling(num_examples=100, expected_batch_size=10, seed=1)
        >>> data = sampling.dataset(np.arange(100), np.arange(100) % 2)
        >>> len(data), len(next(iter(data)))
        (10, 3)
        """
        check_integer("planned_epochs", planned_epochs, error=SamplingError)
        return batches.dataset(self, x, y, sample_weight, planned_epochs, views, augment)

    def _begin_iteration(self):
        return self._state.begin_iteration(self.seed is not None)

    def _groups(self):
        if self.num_groups == 1:
            return [None]
        with self._state.lock:
            if self._state.groups is None:
                rng = self._generator(_ASSIGNMENT_STREAM)
                group_of = rng.integers(self.num_groups, size=self.num_examples)
                self._state.groups = [np.flatnonzero(group_of == g) for g in range(self.num_groups)]
            return self._state.groups

    def _generator(self, *stream):
        return np.random.default_rng(np.random.SeedSequence(self._state.entropy, spawn_key=stream))
