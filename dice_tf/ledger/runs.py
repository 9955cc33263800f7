# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a run has cost so far, from the record that its optimizer keeps.

The record knows what `optimizer.iterations` does not: steps of passes over the data that
were cut short, steps on batches that nobody drew, steps of other privacy parameters. So the
epsilon of a run is asked for here; `accounting.compute_epsilon` is for runs that are planned.
"""

import keras

from dice_tf import accounting
from dice_tf.accounting.events import check_delta, check_run
from dice_tf.checkpoints import private_checkpoints
from dice_tf.errors import SamplingError
from dice_tf.ledger import claims, draw_origins, provenance, units
from dice_tf.mechanism import DiceMechanism
from dice_tf.sampling import Sampling
from dice_tf.training.run import private_optimizer
from dice_tf.training.thresholds import clip_thresholds

NEED = "epsilon"

__all__ = ["accounted_run", "run_epsilon", "run_statement"]


def accounted_run(model: keras.Model, sampling: Sampling) -> tuple[DiceMechanism, Sampling, int]:
    """Returns what a run has been so far, once its record was found to back it.

    Args:
        model: Keras model compiled with the private optimizer of the run.
        sampling: The object that drew its batches; `ShuffledEpochs` for any other data that
            `fit` showed once per epoch.

    Returns:
        `(mechanism, sampling, steps)`, as `accounting.compose_epsilon` takes it. `steps` are
        those made, and those that passes lack that were cut short.

    Raises:
        PlainGradientsError: If the optimizer is not private.
        AccountingError: If optimizer and sampling have different batch sizes, or steps were
            made with other privacy parameters.
        SamplingError: If the steps made so far contradict the sampling.

    Example:

    >>> import dice_tf, keras, numpy as np
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> model.compile(dice_tf.DiceSGDOptimizer(
    ...     l2_norm_clip=1.0, noise_multiplier=2.0, expected_batch_size=8), loss="mse")
    >>> sampling = dice_tf.PoissonSampling(num_examples=80, expected_batch_size=8)
    >>> data = sampling.dataset(np.ones([80, 4]), np.ones([80, 1]))
    >>> history = model.fit(data, epochs=2, verbose=0)
    >>> accounted_run(model, sampling)[2]
    20
    """
    optimizer = private_optimizer(model, NEED)
    check_run(optimizer.mechanism, sampling, 0)
    accounted_steps(model)  # Builds the optimizer, if it can be.
    claims.check_mechanism(optimizer)
    units.check_same_owners(optimizer, sampling)
    steps = claims.check_steps(optimizer, sampling)
    if optimizer.built:
        draw_origins.check_steps(optimizer, sampling)
    return optimizer.mechanism, sampling, steps


def run_epsilon(
    model: keras.Model,
    sampling: Sampling,
    delta: float,
    accountant: str = "rdp",
    *,
    group_size: int = 1,
) -> float:
    """Returns the epsilon of all steps that a model's optimizer has made.

    It costs nothing and changes nothing to ask. `EpsilonCallback` shows the same number.

    Args:
        model: As for `accounted_run`.
        sampling: As for `accounted_run`.
        delta: Float in (0, 1/N).
        accountant: `"rdp"` (fast) or `"pld"` (tighter).
        group_size: Int in [1, N], for people with up to so many examples.

    Returns:
        Float >= 0; infinite if `noise_multiplier` is 0.

    Raises:
        DicePrivacyError: As `accounted_run`, or if an argument is out of range.

    Example:

    >>> import dice_tf, keras, numpy as np
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> model.compile(dice_tf.DiceSGDOptimizer(
    ...     l2_norm_clip=1.0, noise_multiplier=2.0, expected_batch_size=8), loss="mse")
    >>> sampling = dice_tf.PoissonSampling(num_examples=80, expected_batch_size=8)
    >>> for batch in sampling.dataset(np.ones([80, 4]), np.ones([80, 1])):
    ...     logs = dice_tf.private_train_step(model, batch)
    >>> round(run_epsilon(model, sampling, delta=1e-3), 2)
    2.11
    """
    return accounting.compute_epsilon(
        *accounted_run(model, sampling), delta, accountant, group_size=group_size
    )


def run_statement(
    model: keras.Model,
    sampling: Sampling,
    delta: float,
    accountant: str = "rdp",
    *,
    group_size: int = 1,
) -> str:
    """Returns `accounting.privacy_statement` of all steps that a model's optimizer has made.

    Args:
        model: As for `run_epsilon`, like all other arguments.
        sampling: How batches were drawn.
        delta: Float in (0, 1/N).
        accountant: `"rdp"` or `"pld"`: whose epsilon is guaranteed.
        group_size: Int in [1, N]. Above 1, it also says what holds for a person with up to so
            many examples.

    Returns:
        A string of several lines. It names seeds also of earlier samplers and optimizers, and
        the thresholds of the last step if they moved.

    Raises:
        DicePrivacyError: As `run_epsilon`.

    Example:

    >>> import dice_tf, keras
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> model.compile(dice_tf.DiceSGDOptimizer(
    ...     l2_norm_clip=1.0, noise_multiplier=2.0, expected_batch_size=8), loss="mse")
    >>> sampling = dice_tf.PoissonSampling(num_examples=80, expected_batch_size=8)
    >>> print(run_statement(model, sampling, delta=1e-3).splitlines()[1])
      The model after 0 steps, with all models on the way, is (epsilon,
    """
    mechanism, sampling, steps = accounted_run(model, sampling)
    check_delta(delta, sampling.num_examples)
    seeded = provenance.draws_were_seeded(provenance.read_record(model.optimizer))
    return accounting.privacy_statement(
        mechanism,
        sampling,
        steps,
        delta,
        accountant,
        draws_are_secret=False if seeded else None,
        group_size=group_size,
        thresholds=clip_thresholds(model) if mechanism.moves else None,
    )


def accounted_steps(model):
    """Returns the number of steps that epsilon counts, made and lacking, unchecked."""
    optimizer = private_optimizer(model, NEED)
    steps = int(optimizer.iterations.numpy())
    if steps and not optimizer.built:
        private_checkpoints.build_optimizer(model)
    if steps and not optimizer.built:
        raise SamplingError(
            f"The optimizer was loaded with {steps} steps, whose record it can take only when "
            f"it knows the variables of model '{model.name}', which is not built. Call "
            "the model on a batch, then ask again."
        )
    record = provenance.read_record(optimizer)
    return record["steps"] + record["unfinished_steps"]
