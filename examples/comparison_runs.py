# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The training runs of compare.py: stacked ones for its searches, the package's for its tests."""

from concurrent import futures
import functools
import hashlib
import time
from typing import NamedTuple

import comparison_search
import comparison_tasks
import keras
import numpy as np
import stacked_trainer
import trial_log

import dice_tf
from dice_tf import accounting

# Models trained side by side: more would not be faster, and need more memory.
_MOST_MODELS = 48


# By the stacked trainer, and by the package.
_TEST_STAGES = ("test_stacked", "test_package")


class Result(NamedTuple):
    """What came of a trial; the score is on held-out data in a search, on test data after it."""

    l2_norm_clip: float
    error_norm_clip: float
    noise_multiplier: float
    sampling: str
    steps: int
    epsilon: float
    score: float
    seconds: float


class _Draw(NamedTuple):
    """A way to draw, whose noise is calibrated."""

    target_epsilon: float
    num_examples: int
    batch_size: int
    groups: int
    epochs: int


class _Noise(NamedTuple):
    """The sampler that needs less noise, and how much over what one example moves."""

    sampling: str
    noise: float


class Runs:
    """Trains what is not on disk yet, and says how much is left.

    Args:
        folder: `pathlib.Path` of the results.
        task: `comparison_tasks.Task`.
        threads: Int, how many stacks are trained at the same time.
    """

    def __init__(self, folder, task, threads=1):
        self._folder, self._task, self._threads = folder, task, threads
        self._known = {
            stage: trial_log.read(folder / f"{stage}.csv", comparison_search.Trial, Result)
            for stage in ("search", *_TEST_STAGES)
        }
        self._noises = trial_log.read(folder / "noise.csv", _Draw, _Noise)

    def sampling(self, trial, num_examples):
        """Returns how a trial draws its batches: by the sampler that needs less noise.

        Args:
            trial: `comparison_search.Trial`.
            num_examples: Int.
        """
        kind = self._noise(trial, num_examples).sampling
        return _make_sampling(
            kind, num_examples, trial.batch_size, trial.feedback_steps + 1, trial.seed
        )

    def noise_multiplier(self, trial, num_examples):
        """Returns the noise on the sum of clipped gradients over C1, calibrated by PLD.

        Args:
            trial: `comparison_search.Trial`.
            num_examples: Int.
        """
        ratio = (1 - trial.share) / trial.share
        influence = np.sqrt(1 + ratio**2 / max(1, trial.feedback_steps))
        return float(self._noise(trial, num_examples).noise * influence)

    def _noise(self, trial, num_examples):
        key = _Draw(
            trial.target_epsilon,
            num_examples,
            trial.batch_size,
            trial.feedback_steps + 1,
            trial.epochs,
        )
        if key not in self._noises:
            self._noises[key] = _least_noise(key, self._task.delta)
            trial_log.append(self._folder / "noise.csv", key, self._noises[key])
            print(f"Noise: {key}: {self._noises[key]}", flush=True)
        return self._noises[key]

    def search_scores(self, trials):
        """Returns the scores of trials on held-out data.

        Args:
            trials: List of `comparison_search.Trial`.
        """
        known = self._known["search"]
        data = self._task.train_data(for_search=True)
        parts = self._stacks([trial for trial in trials if trial not in known], len(data[0]))
        work = [len(part) * part[0].epochs for part in parts]
        start = time.monotonic()
        for number, (part, found) in enumerate(self._side_by_side(parts, data, self._held_out)):
            for trial, result in zip(part, found, strict=True):
                trial_log.append(self._folder / "search.csv", trial, result)
                known[trial] = result
            done, passed = sum(work[: number + 1]), time.monotonic() - start
            left = passed / done * (sum(work) - done) / 60
            print(
                f"[search: {number + 1} of {len(parts)} stacks of this wave, {left:.0f} min left] "
                f"{len(part)} models, {part[0].epochs} epochs, B={part[0].batch_size}, "
                f"s={part[0].feedback_steps}: best {max(known[t].score for t in part):.4f}",
                flush=True,
            )
        return [known[trial].score for trial in trials]

    def _stacks(self, trials, num_examples):
        """Returns lists of trials that see the same batches."""
        stacks = {}
        for trial in dict.fromkeys(trials):
            kind = self._noise(trial, num_examples).sampling
            alike = trial.epochs, trial.batch_size, trial.feedback_steps, trial.seed, kind
            stacks.setdefault(alike, []).append(trial)
        return [
            stack[start : start + _MOST_MODELS]
            for stack in stacks.values()
            for start in range(0, len(stack), _MOST_MODELS)
        ]

    def _side_by_side(self, parts, data, use):
        """Yields every part with what `use(trials, weights, seconds)` makes of it."""

        def train(part):
            start = time.monotonic()
            weights = self._train_stacked(part, data)
            return part, use(part, weights, (time.monotonic() - start) / len(part))

        # NumPy lets other threads run while it computes.
        with futures.ThreadPoolExecutor(self._threads) as pool:
            yield from pool.map(train, parts)

    def _held_out(self, trials, weights, seconds):
        size = len(self._task.x) - self._task.held_out
        scores = _scores(weights, self._task, self._task.held_out_data()).mean(0)
        sampling = self.sampling(trials[0], size)
        return [
            Result(
                *self._configuration(trial, size)[:3],
                type(sampling).__name__,
                sampling.steps(trial.epochs),
                trial.target_epsilon,
                # Weights that overflowed score nothing.
                float(np.nan_to_num(score, nan=-1.0)),
                seconds,
            )
            for trial, score in zip(trials, scores, strict=True)
        ]

    def _train_stacked(self, trials, data):
        return stacked_trainer.train(
            data,
            self._task.outputs,
            self._task.errors,
            [self._configuration(trial, len(data[0])) for trial in trials],
            self.sampling(trials[0], len(data[0])),
            trials[0].epochs,
            feedback_steps=max(1, trials[0].feedback_steps),
            noise_seed=trials[0].seed,
        )

    def _configuration(self, trial, num_examples):
        return stacked_trainer.Configuration(
            l2_norm_clip=trial.clip * trial.share,
            error_norm_clip=trial.clip * (1 - trial.share),
            noise_multiplier=self.noise_multiplier(trial, num_examples),
            learning_rate=trial.learning_rate,
            momentum=trial.momentum,
            averaging=self._averaging(trial, num_examples),
        )

    def _averaging(self, trial, num_examples):
        steps = self.sampling(trial, num_examples).steps(trial.epochs)
        return max(0.0, 1 - 1 / (trial.averaged_part * steps)) if trial.averaged_part else 0.0

    def train_stacked_tests(self, trials):
        """Trains trials on all training data by the stacked trainer, for `test_scores`.

        Args:
            trials: List of `comparison_search.Trial`.
        """
        missing = [trial for trial in trials if self._known_scores(trial, False) is None]
        data = self._task.train_data(for_search=False)
        stacks = self._stacks(missing, len(data[0]))
        use = lambda part, weights, seconds: (weights, seconds)
        for part, (weights, seconds) in self._side_by_side(stacks, data, use):
            for number, trial in enumerate(part):
                self._test(trial, weights[:, number : number + 1], False, seconds)
                print(f"Trained for a test: {trial} ({seconds:.0f} s)", flush=True)

    def test_scores(self, trial, by_package, self_check=False):
        """Returns the score of every test example, after a training on all training data.

        Args:
            trial: `comparison_search.Trial`.
            by_package: Whether the package trains; if not, `train_stacked_tests` has.
            self_check: Whether the package checks the gradients of the model.

        Returns:
            Float32 `[test examples]`.
        """
        scores = self._known_scores(trial, by_package)
        if scores is None and by_package:
            start = time.monotonic()
            weights = self.train(trial, self_check)[1].layers[0].kernel.numpy()[:, np.newaxis]
            scores = self._test(trial, weights, True, time.monotonic() - start)
        return scores

    def _known_scores(self, trial, by_package):
        path = self._scores_path(trial, by_package)
        if trial in self._known[_TEST_STAGES[by_package]] and path.exists():
            return np.load(path)
        return None

    def _scores_path(self, trial, by_package):
        name = hashlib.sha256(repr(trial).encode()).hexdigest()[:16]
        return self._folder / _TEST_STAGES[by_package] / f"{name}.npy"

    def _test(self, trial, weights, by_package, seconds):
        stage = _TEST_STAGES[by_package]
        scores = _scores(weights, self._task, self._task.test)[:, 0].astype(np.float32)
        # The seed changes nothing about epsilon.
        plan = self.plan(trial._replace(seed=0))
        epsilon = _cached_epsilon(plan)
        if not epsilon <= trial.target_epsilon:
            raise AssertionError(f"epsilon={epsilon} is above that of {trial}.")
        clip = trial.clip * trial.share
        result = Result(
            clip,
            clip * plan.error_norm_clip_ratio,
            plan.noise_multiplier,
            type(plan.sampling).__name__,
            plan.steps,
            epsilon,
            float(scores.mean()),
            seconds,
        )
        path = self._scores_path(trial, by_package)
        path.parent.mkdir(exist_ok=True)
        np.save(path, scores)
        trial_log.append(self._folder / f"{stage}.csv", trial, result)
        self._known[stage][trial] = result
        return scores

    def test_result(self, trial, by_package):
        """Returns the `Result` of a trial that was tested."""
        return self._known[_TEST_STAGES[by_package]][trial]

    def plan(self, trial):
        """Returns the `dice_tf.PrivacyPlan` of a trial, on all training data.

        Args:
            trial: `comparison_search.Trial`.
        """
        size = len(self._task.x)
        return dice_tf.PrivacyPlan(
            sampling=self.sampling(trial, size),
            epochs=trial.epochs,
            noise_multiplier=self.noise_multiplier(trial, size),
            delta=self._task.delta,
            feedback_steps=trial.feedback_steps,
            error_norm_clip_ratio=(1 - trial.share) / trial.share,
        )

    def train(self, trial, self_check):
        """Trains a trial with the package, on all training data.

        Args:
            trial: `comparison_search.Trial`.
            self_check: Whether the gradients of the model are checked with its first batch.

        Returns:
            `dice_tf.PrivacyPlan` and the `keras.Model`.
        """
        keras.backend.clear_session()
        data = self._task.train_data(for_search=False)
        plan = self.plan(trial)
        averaging = self._averaging(trial, len(data[0]))
        optimizer = dice_tf.DiceSGDOptimizer(
            learning_rate=trial.learning_rate,
            momentum=trial.momentum,
            use_ema=averaging > 0,
            ema_momentum=averaging or 0.99,
            l2_norm_clip=trial.clip * trial.share,
            plan=plan,
            noise_seed=trial.seed,
            self_check=self_check,
        )
        model = comparison_tasks.make_model(self._task)
        model.compile(optimizer, self._task.loss)
        budget = plan.callback()
        model.fit(plan.dataset(*data), epochs=plan.epochs, callbacks=[budget], verbose=0)
        assert budget.accounted_steps() == plan.steps, (budget.accounted_steps(), plan.steps)
        return plan, model


@functools.cache
def _cached_epsilon(plan):
    return plan.epsilon()


def _make_sampling(kind, num_examples, batch_size, groups, seed):
    if kind == "allocation":
        return dice_tf.RandomAllocation(num_examples, batch_size, groups, seed=seed)
    if groups == 1:
        return dice_tf.PoissonSampling(num_examples, batch_size, seed=seed)
    return dice_tf.CyclicPoissonSampling(num_examples, batch_size, groups, seed=seed)


def _least_noise(draw, delta):
    """Returns the `_Noise` of the sampler that needs less of it for a `_Draw`."""
    samplings = {
        kind: _make_sampling(kind, draw.num_examples, draw.batch_size, draw.groups, None)
        for kind in ("poisson", "allocation")
    }
    steps = samplings["poisson"].steps(draw.epochs)
    # The fast accountant's answer for Poisson sampling is a good place to start from.
    noise = accounting.calibrate_noise_multiplier(
        draw.target_epsilon, delta, samplings["poisson"], steps, error_norm_clip=0.0
    )
    noises = {}
    for kind in ("allocation", "poisson"):
        epsilon = _epsilon_by_noise(samplings[kind], draw.epochs, delta)
        # Poisson sampling is calibrated only where it may need less than allocation.
        if not noises or epsilon(noise) <= draw.target_epsilon:
            noises[kind] = noise = _calibrated(epsilon, draw.target_epsilon, noise)
    kind = min(noises, key=noises.get)
    return _Noise(kind, noises[kind])


def _epsilon_by_noise(sampling, epochs, delta):
    """Returns epsilon by PLD as a function of noise over what one example moves."""

    def epsilon(noise):
        mechanism = dice_tf.DiceMechanism(
            # The influence is C1 then; any other split of it into head and residual costs the same.
            l2_norm_clip=1.0,
            error_norm_clip=0.0,
            noise_multiplier=noise,
            expected_batch_size=sampling.expected_batch_size,
        )
        return accounting.compute_epsilon(
            mechanism, sampling, sampling.steps(epochs), delta, accountant="pld"
        )

    return epsilon


def _calibrated(epsilon, target, noise):
    """Returns noise whose epsilon is the target or up to 0.1 % below it."""
    slope, last = -1.3, None
    for _ in range(30):
        value = epsilon(noise)
        if 0.999 * target <= value <= target:
            return noise
        point = np.log(noise), np.log(value)
        if last is not None and abs(point[0] - last[0]) > 1e-6:
            slope = min(-0.3, (point[1] - last[1]) / (point[0] - last[0]))
        last = point
        noise = float(noise * np.exp((np.log(0.9995 * target) - point[1]) / slope))
    raise ValueError(f"No noise found for epsilon={target}.")


def _scores(weights, task, data):
    """Returns the scores `[rows, models]` of all models on data."""
    x, y = data
    outputs = x @ weights.reshape(len(weights), -1)
    return task.example_scores(outputs.reshape(len(x), -1, task.outputs), y)
