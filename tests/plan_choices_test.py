# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a `PrivacyPlan` chooses, prints and warns of."""

import warnings

import numpy as np
from plan_test import make_data, make_model
import pytest

import dice_tf
from dice_tf import accounting
from dice_tf.errors import (
    NoisyPlanWarning,
)
from dice_tf.mechanism import DiceMechanism
from dice_tf.plan import PrivacyPlan
from dice_tf.sampling import CyclicPoissonSampling, PoissonSampling, ShuffledEpochs


def chosen(num_examples, batch_size, epochs, target_epsilon=8.0, **arguments):
    plan = PrivacyPlan(
        num_examples=num_examples,
        batch_size=batch_size,
        epochs=epochs,
        target_epsilon=target_epsilon,
        **arguments,
    )
    assert plan.sampling.num_groups >= min(plan.feedback_steps + 1, 8)
    return plan.feedback_steps, round(1 / (1 + plan.error_norm_clip_ratio), 9)


def test_feedback_is_chosen_by_steps_data_and_noise():
    # Fifty steps per epoch.
    for epochs, expected in [
        (140, (7, 0.3)), (14, (7, 0.3)), (13, (3, 0.5)), (7, (3, 0.5)), (6, (1, 0.5)),
        (4, (1, 0.5)), (3, (0, 1.0)),
    ]:  # fmt: skip
        assert chosen(5000, 100, epochs) == expected
    # As many steps, but too few examples for the groups.
    assert chosen(799, 100, 100, 100.0) == (3, 0.5)
    assert chosen(399, 100, 200, 100.0) == (1, 0.5)
    assert chosen(199, 100, 400, 100.0) == (0, 1.0)


@pytest.mark.parametrize("sizes", [(60_000, 2048, 20, 3.0), (60_000, 512, 10, 2.7),
                                   (5_000, 250, 100, 1.0), (20_000, 500, 15, 2.0)])  # fmt: skip
def test_feedback_is_chosen_where_it_saves_noise(sizes):
    num_examples, batch_size, epochs, target_epsilon = sizes
    plan = lambda feedback_steps: PrivacyPlan(
        num_examples=num_examples, batch_size=batch_size, epochs=epochs,
        target_epsilon=target_epsilon, feedback_steps=feedback_steps, accountant="rdp",
    )  # fmt: skip
    # On the scale of C1 + C2.
    noise = lambda plan: plan.noise_multiplier / (1 + plan.error_norm_clip_ratio)
    picked, dp_sgd = plan(None).feedback_steps, noise(plan(0))
    saves = [s for s in (7, 3, 1) if noise(plan(s)) <= 0.97 * dp_sgd]
    steps = epochs * num_examples / batch_size
    allowed = [s for s in saves if steps >= {7: 700, 3: 350, 1: 200}[s]]
    assert picked == (allowed[0] if allowed else 0)


def test_feedback_that_is_given_is_not_chosen():
    # What is given is not chosen.
    assert chosen(1000, 100, 1, feedback_steps=4) == (4, 0.5)
    assert chosen(1000, 100, 70, error_norm_clip_ratio=3) == (7, 0.25)
    assert chosen(1000, 100, 70, error_norm_clip_ratio=0) == (0, 1.0)
    assert chosen(1000, 100, 70, feedback_steps=0) == (0, 1.0)
    for sampling, expected in [
        (CyclicPoissonSampling(1000, 100, 8), (7, 0.3)),
        (CyclicPoissonSampling(1000, 100), (1, 0.5)),
        (CyclicPoissonSampling(1000, 100, 1), (0, 1.0)),
        (PoissonSampling(1000, 100), (0, 1.0)),
        (ShuffledEpochs(1000, 100), (0, 1.0)),
    ]:
        plan = PrivacyPlan(sampling=sampling, epochs=70, noise_multiplier=1.0)
        assert plan.sampling is sampling and (plan.num_examples, plan.batch_size) == (1000, 100)
        assert (plan.feedback_steps, 1 / (1 + plan.error_norm_clip_ratio)) == pytest.approx(
            expected
        )
    # Feedback without groups is accounted for what it is.
    plan = PrivacyPlan(
        sampling=PoissonSampling(1000, 100), epochs=3, noise_multiplier=1.0, feedback_steps=1
    )
    mechanism = DiceMechanism(l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=100)
    assert plan.epsilon() == accounting.compute_epsilon(mechanism, plan.sampling, 30, 1e-4, "pld")


def test_print_says_what_was_chosen_and_what_it_costs():
    plan = PrivacyPlan(num_examples=60_000, batch_size=2048, epochs=20, target_epsilon=3.0)
    text = " ".join(str(plan).split())
    by_rdp = accounting.compute_epsilon(plan.mechanism(), plan.sampling, 600, plan.delta, "rdp")
    dp_sgd = accounting.calibrate_noise_multiplier(
        plan.epsilon(), plan.delta, PoissonSampling(60_000, 2048), 600, 2.0, 0.0, accountant="pld"
    )
    for words in (
        "60000 examples, 2048 expected in a batch",
        "CyclicPoissonSampling, 2 groups",
        f"600 = 20 epochs of 30 steps, each {30 * 2048 / 60_000:.2f} passes over the data",
        "over 1 step (chosen for about 580 steps on 60000 examples)",
        "1 x l2_norm_clip; gradients arrive in full up to 2 x l2_norm_clip",
        f"{plan.noise_multiplier:.4g}, calibrated for epsilon = 3",
        f"{plan.noise_multiplier / 2048:.3g} x l2_norm_clip per coordinate",
        # DP-SGD that clips to 2, in units of C1.
        f"has {dp_sgd * 2.0 / 2048:.3g} at the same epsilon",
        "1.67e-06 (a tenth of 1/N)",
        f"3.000 by PLD, the accountant of this plan; {by_rdp:.2f}",
        "by RDP",
    ):
        assert words in text, (words, text)
    assert "WARNING" not in text
    assert max(map(len, str(plan).splitlines())) <= 100
    # Nothing is said to be chosen that was given.
    given = PrivacyPlan(
        num_examples=1000, batch_size=10, epochs=2, noise_multiplier=0.0, delta=1e-5,
        feedback_steps=1, accountant="rdp",
    )  # fmt: skip
    text = str(given)
    assert "chosen" not in text and "a tenth" not in text and "calibrated" not in text
    assert "there is NO privacy" in text and "infinite by RDP" in text


def test_noise_that_drowns_the_signal():
    def plan_of(noise_multiplier, **arguments):
        arguments = {"epochs": 50, "feedback_steps": 3, **arguments}
        return PrivacyPlan(
            num_examples=1000, batch_size=100, noise_multiplier=noise_multiplier, **arguments
        )

    # The formula against a simulation of gradients that all agree and are all clipped.
    plan = plan_of(30.0, error_norm_clip_ratio=2.0)
    mechanism = plan.mechanism(l2_norm_clip=0.25)
    random, steps = np.random.default_rng(0), plan.steps
    noise = random.normal(0, mechanism.noise_stddev, (steps, 4000)).sum(axis=0)
    signal = steps * (mechanism.l2_norm_clip + mechanism.error_norm_clip)
    expected = signal / np.linalg.norm(noise)
    assert plan.signal_to_noise(4000) == pytest.approx(expected, rel=0.05)
    assert plan_of(0.0).signal_to_noise(10**9) == np.inf
    # Both sides, in print, for ten thousand parameters.
    edge = 30.0 * plan.signal_to_noise(10_000)
    for factor, drowned in ((0.99, False), (1.01, True)):
        other = plan_of(edge * factor, error_norm_clip_ratio=2.0)
        assert (other.signal_to_noise(10_000) < 1) == drowned
        assert ("WARNING: the noise drowns the signal in 10000" in str(other)) == drowned


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_fit_warns_of_noise_that_drowns_the_signal_in_that_model(factor):
    x, y = make_data()
    arguments = dict(num_examples=200, batch_size=20, epochs=1)
    # 5 x 3 parameters.
    edge = PrivacyPlan(**arguments, noise_multiplier=1.0).signal_to_noise(15)
    plan = PrivacyPlan(**arguments, noise_multiplier=edge * factor)
    model = make_model()
    optimizer = dice_tf.DiceSGDOptimizer(0.1, l2_norm_clip=0.25, plan=plan)
    model.compile(optimizer, "sparse_categorical_crossentropy")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(plan.dataset(x, y), callbacks=[plan.callback()], verbose=0)
    texts = [str(w.message) for w in caught if w.category is NoisyPlanWarning]
    assert len(texts) == (factor > 1)
    assert all("drowns the signal in 15 parameters" in t and len(t.split()) < 60 for t in texts)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
