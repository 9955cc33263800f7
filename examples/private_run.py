# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""One private training run: its plan, the numbers it prints, `fit`, and the statement."""

import pathlib
from typing import NamedTuple

import keras

import dice_tf
from dice_tf import accounting


class Plan(NamedTuple):
    """Everything that decides how a private run trains.

    Attributes:
        sampling: How batches are drawn.
        optimizer: The private optimizer.
        steps: Int, number of optimizer steps.
        delta: Float.
    """

    sampling: dice_tf.PoissonSampling | dice_tf.CyclicPoissonSampling | dice_tf.ShuffledEpochs
    optimizer: keras.optimizers.Optimizer
    steps: int
    delta: float


def make_sampling(settings, num_examples):
    """Returns how batches are drawn.

    Args:
        settings: `Settings` of the flags.
        num_examples: Int, number of training examples.
    """
    size, seed = settings.batch_size, settings.seed
    if settings.sampling == "poisson":
        return dice_tf.PoissonSampling(num_examples, size, seed=seed)
    if settings.sampling == "shuffled":
        return dice_tf.ShuffledEpochs(num_examples, size, seed=seed)
    return dice_tf.CyclicPoissonSampling(num_examples, size, settings.num_groups, seed=seed)


def make_plan(settings, num_examples, make_optimizer):
    """Returns the sampling and the optimizer, with noise for the budget asked for.

    Args:
        settings: `Settings` of the flags.
        num_examples: Int, number of training examples.
        make_optimizer: Function from the number of steps, and keyword arguments that
            decide privacy and memory, to the private optimizer.

    Returns:
        `Plan`.
    """
    sampling = make_sampling(settings, num_examples)
    steps = sampling.steps(settings.epochs)
    clips = dict(l2_norm_clip=settings.l2_norm_clip, error_norm_clip=settings.error_norm_clip)
    noise_multiplier = settings.noise_multiplier
    if noise_multiplier is None:
        noise_multiplier = accounting.calibrate_noise_multiplier(
            settings.epsilon, settings.delta, sampling, steps, **clips
        )
    optimizer = make_optimizer(
        steps,
        noise_multiplier=noise_multiplier,
        expected_batch_size=settings.batch_size,
        chunk_size=settings.chunk_size,
        noise_seed=settings.seed,
        **clips,
    )
    return Plan(sampling, optimizer, steps, settings.delta)


def privacy_parameters(plan):
    """Returns every number that enters epsilon, and epsilon after the whole run.

    Args:
        plan: `Plan`.

    Returns:
        Dict from name to value.
    """
    mechanism, sampling = plan.optimizer.mechanism, plan.sampling
    guarantee = accounting.guarantee(mechanism, sampling, plan.steps, plan.delta)
    return {
        "num_examples": sampling.num_examples,
        "expected_batch_size": sampling.expected_batch_size,
        "sampling": type(sampling).__name__,
        "num_groups": sampling.num_groups,
        "sampling_probability": sampling.sampling_probability,
        "steps": plan.steps,
        "rounds": sampling.rounds(plan.steps),
        "l2_norm_clip": mechanism.l2_norm_clip,
        "error_norm_clip": mechanism.error_norm_clip,
        "bound_residuals": mechanism.bound_residuals,
        "noise_multiplier": mechanism.noise_multiplier,
        "noise_stddev": mechanism.noise_stddev,
        "delta": plan.delta,
        "neighbouring_relation": guarantee.neighbouring_relation,
        "accountant": guarantee.accountant,
        "epsilon": guarantee.epsilon,
    }


def print_privacy_parameters(plan, seed=None):
    """Prints what enters epsilon, and a warning if the noise has a known seed.

    Args:
        plan: `Plan`.
        seed: Int of `--seed`, or `None`.
    """
    print("\nPrivacy parameters:")
    for name, value in privacy_parameters(plan).items():
        print(f"  {name}: {value}")
    if seed is not None:
        print(f"--seed={seed} fixes the noise: private only while nobody knows it.")
    print(flush=True)


def fit(settings, plan, model, data, validation):
    """Trains a model that is compiled with the optimizer of `plan`, and states the guarantee.

    Args:
        settings: `Settings` of the flags.
        plan: `Plan`.
        model: `keras.Model`.
        data: Pair of inputs and targets, arrays.
        validation: Pair of inputs and targets to evaluate on.

    Returns:
        The Keras `History`.
    """
    print_privacy_parameters(plan, settings.seed)
    budget = dice_tf.EpsilonCallback(plan.sampling, plan.delta, target_epsilon=settings.epsilon)
    history = model.fit(
        plan.sampling.dataset(*data, planned_epochs=settings.epochs),
        epochs=settings.epochs,
        validation_data=validation,
        callbacks=[budget, *csv_logger(settings.output_dir)],
    )
    mechanism, steps = plan.optimizer.mechanism, budget.accounted_steps()
    print(f"\n{accounting.guarantee(mechanism, plan.sampling, steps, plan.delta)}.")
    if settings.output_dir is not None:
        path = pathlib.Path(settings.output_dir) / "privacy_statement.txt"
        path.write_text(budget.statement(), encoding="utf-8")
        print(f"The full statement is in {path}")
    return history


def csv_logger(output_dir):
    """Returns a list with the callback that writes training.csv, or an empty one.

    Args:
        output_dir: Text, or `None` for nothing.
    """
    if output_dir is None:
        return []
    return [keras.callbacks.CSVLogger(str(pathlib.Path(output_dir) / "training.csv"))]
