# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""One private training run: its plan from the flags, `fit`, and the statement."""

import pathlib

from absl import app, flags
import keras

import dice_tf
from dice_tf import accounting

ACCOUNTANTS = ("pld", "rdp")


def define_accountant(flag_values):
    """Defines `--accountant`.

    Args:
        flag_values: `absl.flags.FlagValues` to define it in.
    """
    flags.DEFINE_enum(
        "accountant",
        "pld",
        ACCOUNTANTS,
        "Whose epsilon the run has: pld (tight), or rdp, which is a few percent larger.",
        flag_values=flag_values,
    )


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


def make_plan(settings, num_examples):
    """Returns the `dice_tf.PrivacyPlan` that the flags mean.

    Args:
        settings: `Settings` of the flags.
        num_examples: Int, number of training examples.

    Raises:
        absl.app.UsageError: If there is no threshold to clip to.
    """
    if settings.l2_norm_clip <= 0:
        raise app.UsageError(
            f"--l2_norm_clip must be above 0. Received: --l2_norm_clip={settings.l2_norm_clip}."
        )
    return dice_tf.PrivacyPlan(
        sampling=make_sampling(settings, num_examples),
        epochs=settings.epochs,
        target_epsilon=settings.epsilon,
        noise_multiplier=settings.noise_multiplier,
        delta=settings.delta,
        accountant=settings.accountant,
        # The defaults of the other flags were chosen with one step of feedback.
        feedback_steps=1 if settings.error_norm_clip else 0,
        error_norm_clip_ratio=settings.error_norm_clip / settings.l2_norm_clip,
    )


def fit(settings, plan, model, data, validation):
    """Trains a model that is compiled with an optimizer of `plan`, and states the guarantee.

    Args:
        settings: `Settings` of the flags.
        plan: `dice_tf.PrivacyPlan`.
        model: `keras.Model`.
        data: Pair of inputs and targets, arrays.
        validation: Pair of inputs and targets to evaluate on.

    Returns:
        The Keras `History`.
    """
    print(f"\n{plan}")
    if settings.seed is not None:
        print(f"--seed={settings.seed} fixes the noise: private only while nobody knows it.")
    print(flush=True)
    budget = plan.callback()
    history = model.fit(
        plan.dataset(*data),
        epochs=plan.epochs,
        validation_data=validation,
        callbacks=[budget, *csv_logger(settings.output_dir)],
    )
    mechanism, steps = model.optimizer.mechanism, budget.accounted_steps()
    guarantee = accounting.guarantee(
        mechanism, plan.sampling, steps, plan.delta, accountant=plan.accountant
    )
    print(f"\n{guarantee}.")
    if settings.output_dir is not None:
        path = pathlib.Path(settings.output_dir) / "privacy_statement.txt"
        path.write_text(plan.statement(model), encoding="utf-8")
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
