# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Mistakes that type checkers are to flag: one in each line that ends in `# type: ignore`.

Both checkers count a `# type: ignore` that is not needed as an error, so a mistake that is
no longer flagged fails `make lint`. Nobody runs this.
"""

import dice_tf
from dice_tf import accounting

sampling = dice_tf.PoissonSampling(num_examples=20_000, expected_batch_size=500)

dice_tf.DiceSGDOptimizer(
    l2_norm_clip="x",  # type: ignore[arg-type]
    noise_multiplier="two",  # type: ignore[arg-type]
    expected_batch_size=500.5,  # type: ignore[arg-type]
    feedback_steps=[1],  # type: ignore[arg-type]
    plan=sampling,  # type: ignore[arg-type]
)
dice_tf.DiceMechanism(
    l2_norm_clip="x",  # type: ignore[arg-type]
    noise_multiplier="two",  # type: ignore[arg-type]
    expected_batch_size="many",  # type: ignore[arg-type]
)
dice_tf.PrivacyPlan(
    num_examples="all",  # type: ignore[arg-type]
    batch_size=2048,
    epochs=20,
    target_epsilon="small",  # type: ignore[arg-type]
)
dice_tf.PoissonSampling("all", 500)  # type: ignore[arg-type]
dice_tf.CyclicPoissonSampling(20_000, 500, seed="x")  # type: ignore[arg-type]
dice_tf.EpsilonCallback("poisson", delta=1e-5)  # type: ignore[arg-type]
dice_tf.EpsilonCallback(sampling, delta="small")  # type: ignore[arg-type]
accounting.calibrate_noise_multiplier(
    target_epsilon="two",  # type: ignore[arg-type]
    delta=5e-6,
    sampling="poisson",  # type: ignore[arg-type]
    steps=600,
)
steps: str = sampling.steps(epochs=15)  # type: ignore[assignment]
sampling.num_example  # type: ignore[attr-defined]
