# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The training runs of compare.py: stacked ones where the model is linear, and the package's."""

from concurrent import futures
import functools
import hashlib
import time
from typing import NamedTuple

import comparison_noise
import comparison_search
import keras
import numpy as np
import stacked_trainer
import trial_log

import dice_tf

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
        self._noises = comparison_noise.Noises(folder / "noise.csv", task.delta)

    def sampling(self, trial, num_examples):
        """Returns how a trial draws its batches: by the sampler that needs less noise.

        Args:
            trial: `comparison_search.Trial`.
            num_examples: Int.
        """
        kind = self._noise(trial, num_examples).sampling
        return comparison_noise.make_sampling(
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
        return self._noises.least(
            comparison_noise.Draw(
                trial.target_epsilon,
                num_examples,
                trial.batch_size,
                trial.feedback_steps + 1,
                trial.epochs,
            )
        )

    def search_scores(self, trials):
        """Returns the scores of trials on held-out data.

        Args:
            trials: List of `comparison_search.Trial`.
        """
        known = self._known["search"]
        size = len(self._task.x) - self._task.held_out
        parts = self._stacks([trial for trial in trials if trial not in known], size)
        work = [len(part) * part[0].epochs for part in parts]
        start = time.monotonic()
        for number, (part, scores, seconds) in enumerate(self._side_by_side(parts, True)):
            for trial, score in zip(part, scores.mean(0), strict=True):
                # Weights that overflowed score nothing.
                score = float(np.nan_to_num(score, nan=-1.0))
                known[trial] = self._result(trial, size, trial.target_epsilon, score, seconds)
                trial_log.append(self._folder / "search.csv", trial, known[trial])
            done, passed = sum(work[: number + 1]), time.monotonic() - start
            left = passed / done * (sum(work) - done) / 60
            print(
                f"[search: {number + 1} of {len(parts)} trainings of this wave, {left:.0f} min "
                f"left] models: {len(part)}, {part[0].epochs} epochs, B={part[0].batch_size}, "
                f"s={part[0].feedback_steps}: best {max(known[t].score for t in part):.4f}",
                flush=True,
            )
        return [known[trial].score for trial in trials]

    def _stacks(self, trials, num_examples):
        """Returns lists of trials that are trained at once, because they see the same batches."""
        if not self._task.linear:
            return [[trial] for trial in dict.fromkeys(trials)]
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

    def _side_by_side(self, parts, for_search):
        """Yields every part with its scores `[rows, models]`, and the seconds of one model.

        Scores are those of held-out data in a search, and of test data otherwise.
        """
        x, y = self._task.held_out_data() if for_search else self._task.test

        def train(part):
            start = time.monotonic()
            if self._task.linear:
                weights = self._train_stacked(part, self._task.train_data(for_search))
                outputs = (x @ weights.reshape(len(weights), -1)).reshape(len(x), len(part), -1)
            else:
                # Comparing gradients with single ones in every trial would tell nothing new.
                outputs = _outputs(self.train(*part, for_search, self_check=False), x)
            seconds = (time.monotonic() - start) / len(part)
            return part, self._task.example_scores(outputs, y), seconds

        if not self._task.linear:
            yield from map(train, parts)
            return
        # NumPy lets other threads run while it computes.
        with futures.ThreadPoolExecutor(self._threads) as pool:
            yield from pool.map(train, parts)

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
        stacks = self._stacks(missing, len(self._task.x))
        for part, scores, seconds in self._side_by_side(stacks, False):
            for trial, score in zip(part, scores.T, strict=True):
                self._keep_test(trial, score, False, seconds)
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
            x, y = self._task.test
            outputs = _outputs(self.train(trial, False, self_check), x)
            scores = self._task.example_scores(outputs, y)[:, 0]
            self._keep_test(trial, scores, True, time.monotonic() - start)
        return scores

    def _known_scores(self, trial, by_package):
        path = self._scores_path(trial, by_package)
        if trial in self._known[_TEST_STAGES[by_package]] and path.exists():
            return np.load(path)
        return None

    def _scores_path(self, trial, by_package):
        name = hashlib.sha256(repr(trial).encode()).hexdigest()[:16]
        return self._folder / _TEST_STAGES[by_package] / f"{name}.npy"

    def _keep_test(self, trial, scores, by_package, seconds):
        size = len(self._task.x)
        # The seed changes nothing about epsilon.
        epsilon = _cached_epsilon(self.plan(trial._replace(seed=0), size))
        if not epsilon <= trial.target_epsilon:
            raise AssertionError(f"epsilon={epsilon} is above that of {trial}.")
        path = self._scores_path(trial, by_package)
        path.parent.mkdir(exist_ok=True)
        np.save(path, scores.astype(np.float32))
        stage = _TEST_STAGES[by_package]
        result = self._result(trial, size, epsilon, float(scores.mean()), seconds)
        trial_log.append(self._folder / f"{stage}.csv", trial, result)
        self._known[stage][trial] = result

    def _result(self, trial, num_examples, epsilon, score, seconds):
        sampling = self.sampling(trial, num_examples)
        return Result(
            trial.clip * trial.share,
            trial.clip * (1 - trial.share),
            self.noise_multiplier(trial, num_examples),
            type(sampling).__name__,
            sampling.steps(trial.epochs),
            epsilon,
            score,
            seconds,
        )

    def test_result(self, trial, by_package):
        """Returns the `Result` of a trial that was tested."""
        return self._known[_TEST_STAGES[by_package]][trial]

    def plan(self, trial, num_examples):
        """Returns the `dice_tf.PrivacyPlan` of a trial.

        Args:
            trial: `comparison_search.Trial`.
            num_examples: Int.
        """
        return dice_tf.PrivacyPlan(
            sampling=self.sampling(trial, num_examples),
            epochs=trial.epochs,
            noise_multiplier=self.noise_multiplier(trial, num_examples),
            delta=self._task.delta,
            feedback_steps=trial.feedback_steps,
            error_norm_clip_ratio=(1 - trial.share) / trial.share,
        )

    def train(self, trial, for_search, self_check):
        """Trains a trial with the package.

        Args:
            trial: `comparison_search.Trial`.
            for_search: Whether held-out data is left out.
            self_check: Whether the gradients of the model are checked with its first batch.

        Returns:
            The `keras.Model`.
        """
        keras.backend.clear_session()
        # Of the first weights. The plan and the optimizer have their own.
        keras.utils.set_random_seed(trial.seed)
        data = self._task.train_data(for_search)
        plan = self.plan(trial, len(data[0]))
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
        model = self._task.make_model()
        model.compile(optimizer, self._task.loss)
        budget = plan.callback()
        model.fit(plan.dataset(*data), epochs=plan.epochs, callbacks=[budget], verbose=0)
        assert budget.accounted_steps() == plan.steps, (budget.accounted_steps(), plan.steps)
        return model


@functools.cache
def _cached_epsilon(plan):
    return plan.epsilon()


def _outputs(model, x):
    """Returns the outputs `[rows, 1, outputs]` of one model."""
    # Not by `predict`, which would trace a graph for every model.
    slices = [x[start : start + 1000] for start in range(0, len(x), 1000)]
    return np.concatenate([model(rows, training=False) for rows in slices])[:, np.newaxis]
