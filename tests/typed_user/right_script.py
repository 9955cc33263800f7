# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""A user's script as type checkers see it: nothing here may be flagged. Nobody runs it.

The first half is README's example, the second the same run spelled out.
"""

import keras
import numpy as np
from numpy.typing import NDArray

import dice_tf
from dice_tf import accounting, auditing


def train_by_plan(model: keras.Model, x: NDArray[np.float32], y: NDArray[np.int64]) -> str:
    plan = dice_tf.PrivacyPlan(
        num_examples=60_000, batch_size=2048, epochs=20, target_epsilon=3.0, delta=1.6e-6
    )
    optimizer = dice_tf.DiceSGDOptimizer(
        learning_rate=1.0, momentum=0.9, l2_norm_clip=0.25, plan=plan
    )
    model.compile(optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(plan.dataset(x, y), epochs=plan.epochs, callbacks=[plan.callback()])
    return plan.statement(model)


def train_spelled_out(model: keras.Model, x: NDArray[np.float32], y: NDArray[np.int64]) -> float:
    sampling = dice_tf.CyclicPoissonSampling(
        num_examples=20_000, expected_batch_size=500, num_groups=2
    )
    noise_multiplier = accounting.calibrate_noise_multiplier(
        target_epsilon=2.0, delta=5e-6, sampling=sampling, steps=sampling.steps(epochs=15)
    )
    optimizer = dice_tf.DiceAdamOptimizer(
        learning_rate=0.5,
        l2_norm_clip=0.5,
        error_norm_clip=0.5,
        noise_multiplier=noise_multiplier,
        expected_batch_size=500,
    )
    budget = dice_tf.EpsilonCallback(sampling, delta=5e-6, target_epsilon=2.0, accountant="pld")
    model.compile(optimizer, loss="sparse_categorical_crossentropy")
    model.fit(sampling.dataset(x, y), epochs=15, callbacks=[budget])
    mechanism: dice_tf.DiceMechanism = optimizer.mechanism
    total_threshold: float = mechanism.l2_norm_clip + mechanism.error_norm_clip
    spent: float = accounting.compute_epsilon(mechanism, sampling, steps=600, delta=5e-6)
    statement: str = budget.statement() + dice_tf.run_statement(model, sampling, delta=5e-6)
    print(statement, total_threshold, spent, sampling.steps_per_epoch, optimizer.errors)
    return budget.epsilon()


def audit(member_scores: NDArray[np.float64], other_scores: NDArray[np.float64]) -> float:
    return auditing.epsilon_lower_bound(member_scores, other_scores, delta=1e-5)
