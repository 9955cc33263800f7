# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What thresholds and noise that move cost: dp_accounting's own events, windows one by one."""

import dataclasses

import dp_accounting
from dp_accounting import pld, rdp
import numpy as np
import pytest

import dice_tf
from dice_tf import AdaptiveClipping, DiceMechanism, PiecewiseSchedule, accounting
from dice_tf.accounting import random_allocation
from dice_tf.errors import AccountingError, MechanismError

N, B, DELTA = 2000, 100, 1e-5
Z, Y, RATIO, S = 1.3, 4.0, 1.5, 3
ADAPTIVE = AdaptiveClipping(count_noise_multiplier=Y)
SCHEDULE = PiecewiseSchedule([10], [1.5, 0.8])


def mechanism(**arguments):
    defaults = dict(
        l2_norm_clip=0.5, error_norm_clip=0.5 * RATIO, feedback_steps=S, noise_multiplier=Z,
        expected_batch_size=B, clipping=ADAPTIVE,
    )  # fmt: skip
    return DiceMechanism(**{**defaults, **arguments})


def multiplier(in_quadrature):
    """Written out from form 8 of docs/privacy.md."""
    gradients = (1 + RATIO**2 / S if in_quadrature else (1 + RATIO) ** 2) / Z**2
    return (gradients + 1 / Y**2) ** -0.5


def poisson(probability, noise, count):
    one = dp_accounting.PoissonSampledDpEvent(probability, dp_accounting.GaussianDpEvent(noise))
    return dp_accounting.SelfComposedDpEvent(one, count)


@pytest.mark.parametrize(
    "sampling, event",
    [
        (dice_tf.CyclicPoissonSampling(N, B, S + 1), poisson(0.2, multiplier(True), 10)),
        (dice_tf.CyclicPoissonSampling(N, B, 2), poisson(0.1, multiplier(False), 20)),
        (dice_tf.PoissonSampling(N, B), poisson(0.05, multiplier(False), 40)),
        (dice_tf.ShuffledEpochs(N, B),
         dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(multiplier(False)), 2)),
    ],
    ids=["form_1", "form_2_groups", "form_2", "form_3"],
)  # fmt: skip
def test_events_and_epsilons_of_each_form(sampling, event):
    found = accounting.dp_event(mechanism(), sampling, 40)
    assert type(found) is type(event) and found.count == event.count
    one, other = found.event, event.event
    if isinstance(event.event, dp_accounting.PoissonSampledDpEvent):
        assert one.sampling_probability == other.sampling_probability
        one, other = one.event, other.event
    assert one.noise_multiplier == pytest.approx(other.noise_multiplier, rel=1e-12)
    ours = [accounting.compute_epsilon(mechanism(), sampling, 40, DELTA, a) for a in ("rdp", "pld")]
    renyi = rdp.RdpAccountant().compose(event).get_epsilon(DELTA)
    loss = pld.PLDAccountant(value_discretization_interval=1e-3).compose(event).get_epsilon(DELTA)
    assert ours[0] == pytest.approx(renyi, rel=0.01) and ours[1] == pytest.approx(loss, rel=0.005)


def test_random_allocation_has_the_same_multiplier():
    sampling = dice_tf.RandomAllocation(N, B, num_groups=S + 1)
    (one,) = sampling.accounted_rounds(multiplier(True), 40)
    expected = random_allocation.loss_distribution(5, one.noise_multiplier, 1e-3).self_compose(2)
    found = accounting.compute_epsilon(mechanism(), sampling, 40, DELTA, "pld")
    assert found == pytest.approx(expected.get_epsilon_for_delta(DELTA), rel=0.005)
    assert found < accounting.compute_epsilon(mechanism(), sampling, 40, DELTA, "rdp")


def test_what_the_noise_on_counts_is_by_default():
    default = mechanism(clipping="adaptive")
    # B / 20 of Andrew et al., over an influence of 1/2; and per microbatch, of which there are 25.
    assert default.count_noise_multiplier == 2 * B / 20
    assert mechanism(clipping="adaptive", num_microbatches=25).count_noise_multiplier == 2.5
    assert mechanism(clipping="flat").count_noise_multiplier == np.inf
    flat = mechanism(clipping="flat").sensitivity(separate_entries=True)
    by_hand = np.hypot(flat, Z * 0.5 / 10)
    assert default.sensitivity(separate_entries=True) == pytest.approx(by_hand, rel=1e-12)
    # One epsilon for one threshold and for one per layer, whose counts have more noise each.
    layers = mechanism(clipping=AdaptiveClipping(count_noise_multiplier=Y, per_layer=True))
    sampling = dice_tf.PoissonSampling(N, B)
    assert accounting.compute_epsilon(layers, sampling, 10, DELTA) == accounting.compute_epsilon(
        mechanism(), sampling, 10, DELTA
    )


def test_other_neighbours():
    """Exchanging an example moves a count by 1, twice as far as emptying it; by two moves."""
    shuffled, cyclic = dice_tf.ShuffledEpochs(N, B), dice_tf.CyclicPoissonSampling(N, B, S + 1)
    (one,) = accounting.events.bounded_rounds(mechanism(), shuffled, 20, "replace_by_empty")
    (two,) = accounting.events.bounded_rounds(mechanism(), shuffled, 20, "replace_one")
    assert one.noise_multiplier == pytest.approx(2 * two.noise_multiplier)
    single = accounting.compute_epsilon(mechanism(), cyclic, 8, DELTA, "pld")
    exchange = accounting.compute_epsilon(mechanism(), cyclic, 8, DELTA, "pld", "replace_one")
    halves = accounting.compute_epsilon(mechanism(), cyclic, 8, DELTA / 2, "pld")
    # A removal and an addition: not dp_accounting's pair, proven for shifts known beforehand.
    assert exchange >= single + halves * 0.99
    # One more example in a Poisson draw changes two microbatches, from one side to the other.
    batches = mechanism(num_microbatches=25)
    poisson_rounds = accounting.events.bounded_rounds(
        batches, dice_tf.PoissonSampling(N, B), 1, "add_or_remove_one"
    )
    assert poisson_rounds[0].noise_multiplier == pytest.approx(multiplier(False) / 4)


@pytest.mark.parametrize("moving", [dict(), dict(clipping="flat", schedule=SCHEDULE)])
def test_the_pair_for_exchanges_is_not_for_thresholds_that_move(monkeypatch, moving):
    """Whatever releases of dp_accounting there are that know it."""
    asked, cyclic = [], dice_tf.CyclicPoissonSampling(N, B, S + 1)
    supports = lambda event, relation: bool(asked.append(relation.name))
    monkeypatch.setattr(accounting.account, "supports", supports)
    accounting.compute_epsilon(mechanism(**moving), cyclic, 8, DELTA, "pld", "replace_one")
    assert asked == []
    constant = mechanism(clipping="flat")
    accounting.compute_epsilon(constant, cyclic, 8, DELTA, "pld", "replace_one")
    assert asked == ["REPLACE_ONE"]


@pytest.mark.parametrize(
    "accountant, arguments",
    [
        ("pld", dict(clipping=ADAPTIVE)),
        ("rdp", dict(clipping=ADAPTIVE)),
        ("rdp", dict(schedule=PiecewiseSchedule([10, 25], [1.5, 1.0, 0.7]))),
        ("rdp", dict(clipping=ADAPTIVE, schedule=PiecewiseSchedule([10], [1.5, 0.8]),
                     group_size=2)),
    ],
    ids=["adaptive_pld", "adaptive", "schedule", "both"],
)  # fmt: skip
def test_calibration_meets_the_target(accountant, arguments):
    sampling = dice_tf.CyclicPoissonSampling(N, B, S + 1)
    shared = dict(error_norm_clip=RATIO, feedback_steps=S)
    noise = accounting.calibrate_noise_multiplier(
        6.0, DELTA, sampling, 40, accountant=accountant, **shared, **arguments
    )
    group = {"group_size": arguments.get("group_size", 1)}
    fields = {name: value for name, value in arguments.items() if name != "group_size"}
    run = DiceMechanism(
        l2_norm_clip=1.0, noise_multiplier=noise, expected_batch_size=B, **shared, **fields
    )
    epsilon = accounting.compute_epsilon(run, sampling, 40, DELTA, accountant, **group)
    assert 5.98 < epsilon <= 6.0
    if accountant == "rdp":
        # Cycles that are begun count in full.
        assert accounting.calibrate_steps(6.0, DELTA, run, sampling, **group) == 40
        larger = accounting.calibrate_batch_size(6.0, DELTA, run, sampling, 40, **group)
        assert B <= larger <= B + 1


def test_no_noise_on_gradients_pays_for_counts():
    rule = AdaptiveClipping(count_noise_multiplier=0.3)
    with pytest.raises(AccountingError, match="count_noise_multiplier"):
        accounting.calibrate_noise_multiplier(
            1.0, DELTA, dice_tf.PoissonSampling(N, B), 100, clipping=rule
        )


SCHEDULES = [
    PiecewiseSchedule([13, 14, 33], [1.0, 0.6, 1.4, 0.8]),
    PiecewiseSchedule([20], [1.3, 0.7], [1.0, 0.2]),
    PiecewiseSchedule([7, 30], [0.6, 1.0, 1.7]),
]
ORDERS = (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def factor_at(schedule, step):
    return schedule.noise_factors[sum(step >= b for b in schedule.boundaries)]


def exact_divergence(schedule, steps, groups, feedback_steps, adaptive):
    """Renyi divergences of the worst group: each of its windows at its own noise."""
    worst = np.zeros(len(ORDERS))
    for first in range(groups):
        total = np.zeros(len(ORDERS))
        for t in range(first, steps, groups):
            head = Z * factor_at(schedule, t)
            later = [Z * factor_at(schedule, t + k) for k in range(1, feedback_steps + 1)]
            if groups > feedback_steps:
                squared = head**-2 + sum((RATIO / feedback_steps / z) ** 2 for z in later)
            else:
                # Each part of a split noise hides its own: form 2.
                share = 1 / (1 + RATIO)
                squared = 1 / (share * head**2)
                part = RATIO / feedback_steps / (1 + RATIO)
                squared += sum((RATIO / feedback_steps) ** 2 / (part * z**2) for z in later)
            squared += adaptive / Y**2
            event = poisson(groups * B / N, squared**-0.5, 1)
            total += rdp.RdpAccountant(list(ORDERS)).compose(event)._rdp
        worst = np.maximum(worst, total)
    return worst


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("groups, feedback_steps", [(4, 3), (2, 1), (1, 2), (2, 3)])
def test_schedules_cost_at_least_the_windows_of_every_group(groups, feedback_steps, adaptive):
    sampling = dice_tf.CyclicPoissonSampling(N, B, groups)
    for schedule in SCHEDULES[: 3 if groups == 4 else 2]:
        if adaptive and set(schedule.clip_factors) != {1.0}:
            continue
        run = mechanism(
            feedback_steps=feedback_steps,
            schedule=schedule,
            clipping=ADAPTIVE if adaptive else "flat",
        )
        for steps in (13, 41):
            event = accounting.dp_event(run, sampling, steps)
            claimed = rdp.RdpAccountant(list(ORDERS)).compose(event)._rdp
            exact = exact_divergence(schedule, steps, groups, feedback_steps, adaptive)
            assert np.all(claimed >= exact * (1 - 1e-9))
            if schedule is SCHEDULES[1] and steps == 41:
                # Of some ten cycles at most two straddle a change.
                assert np.all(claimed[:4] <= exact[:4] * 1.3)


def test_a_schedule_that_changes_nothing_costs_nothing():
    constant = PiecewiseSchedule([10, 20], None, [1.0, 0.3, 2.0])
    for sampling in (dice_tf.CyclicPoissonSampling(N, B, 4), dice_tf.ShuffledEpochs(N, B),
                     dice_tf.PoissonSampling(N, B), dice_tf.RandomAllocation(N, B, 4)):  # fmt: skip
        flat = mechanism(clipping="flat")
        moved = dataclasses.replace(flat, schedule=constant)
        epsilons = [accounting.compute_epsilon(m, sampling, 41, DELTA) for m in (flat, moved)]
        assert epsilons[1] == pytest.approx(epsilons[0], rel=1e-9)
        # Half the noise from the start is half the noise.
        late = dataclasses.replace(flat, schedule=PiecewiseSchedule([10**6], [0.5, 1.0]))
        half = dataclasses.replace(flat, noise_multiplier=Z / 2)
        epsilons = [accounting.compute_epsilon(m, sampling, 41, DELTA) for m in (half, late)]
        assert epsilons[1] == pytest.approx(epsilons[0], rel=1e-9)


def test_whole_epochs_cost_the_smallest_noise_that_they_meet():
    run = mechanism(clipping="flat", schedule=PiecewiseSchedule([45], [1.0, 0.5]))
    shuffled = accounting.events.bounded_rounds(run, dice_tf.ShuffledEpochs(N, B), 80)
    both = {r.noise_multiplier: r.count for r in shuffled}
    full = Z / (1 + RATIO)
    # Epochs of 20 steps: two at the first noise, one that straddles, one at the second. An example
    # may be the last of an epoch, and the first of the next.
    assert sorted(both.values()) == [2, 2]
    assert max(both) == pytest.approx(full) and min(both) == pytest.approx(full / 2)
    allocated = accounting.events.bounded_rounds(run, dice_tf.RandomAllocation(N, B, 4), 80)
    noises = sorted((r.noise_multiplier, r.count) for r in allocated)
    window = Z / (1 + RATIO**2 / S) ** 0.5
    assert [n for _, n in noises] == [2, 2]
    assert noises[1][0] == pytest.approx(window) and noises[0][0] == pytest.approx(window / 2)


def test_a_sampler_of_ones_own_has_no_price_under_a_schedule():
    class Half(dice_tf.PoissonSampling):
        def accounted_rounds(self, noise_multiplier, steps):
            return [accounting.Round(1.0, noise_multiplier, steps)]

    run = mechanism(clipping="flat", schedule=SCHEDULES[0])
    with pytest.raises(AccountingError, match="rounds_add_up"):
        accounting.compute_epsilon(run, Half(N, B), 10, DELTA)
    assert accounting.compute_epsilon(mechanism(), Half(N, B), 10, DELTA) > 0


@pytest.mark.parametrize("group_size", [1, 3])
def test_group_size_in_steps_and_batch_sizes(group_size):
    run, sampling = mechanism(clipping="flat"), dice_tf.CyclicPoissonSampling(N, B, S + 1)
    at = lambda steps, size: accounting.compute_epsilon(
        dataclasses.replace(run, expected_batch_size=size),
        dataclasses.replace(sampling, expected_batch_size=size),
        steps, DELTA, group_size=group_size,
    )  # fmt: skip
    steps = accounting.calibrate_steps(12.0, DELTA, run, sampling, group_size=group_size)
    assert at(steps, B) <= 12.0 < at(steps + 1, B)
    size = accounting.calibrate_batch_size(12.0, DELTA, run, sampling, 30, group_size=group_size)
    assert at(30, size) <= 12.0 < at(30, size + 1)


def test_a_plan_is_for_people_with_several_examples():
    sizes = dict(num_examples=N, batch_size=B, epochs=2, target_epsilon=6.0, delta=DELTA)
    plan = dice_tf.PrivacyPlan(group_size=2, accountant="rdp", **sizes)
    run = plan.mechanism()
    epsilon = accounting.compute_epsilon(run, plan.sampling, plan.steps, DELTA, group_size=2)
    assert 5.98 < epsilon <= 6.0 and plan.epsilon() == epsilon
    assert plan.noise_multiplier > dice_tf.PrivacyPlan(accountant="rdp", **sizes).noise_multiplier
    assert "people with up to 2 examples" in " ".join(str(plan).split())
    with pytest.raises(AccountingError, match="group_size"):
        dice_tf.PrivacyPlan(group_size=0, **sizes)


def test_an_optimizer_takes_adaptive_thresholds_from_its_plan_alone():
    sizes = dict(num_examples=N, batch_size=B, epochs=2, target_epsilon=6.0, accountant="rdp")
    plan = dice_tf.PrivacyPlan(clipping=ADAPTIVE, feedback_steps=1, **sizes)
    optimizer = dice_tf.DiceSGDOptimizer(0.1, l2_norm_clip=0.5, plan=plan)
    assert optimizer.mechanism.clipping == ADAPTIVE
    assert 5.98 < accounting.compute_epsilon(optimizer.mechanism, plan.sampling, plan.steps,
                                             plan.delta) <= 6.0  # fmt: skip
    with pytest.raises(MechanismError, match="Adaptive thresholds cost noise"):
        dice_tf.DiceSGDOptimizer(0.1, l2_norm_clip=0.5, plan=plan, clipping="flat")
    plain = dice_tf.PrivacyPlan(feedback_steps=1, **sizes)
    with pytest.raises(MechanismError, match="Adaptive thresholds cost noise"):
        dice_tf.DiceSGDOptimizer(0.1, l2_norm_clip=0.5, plan=plain, clipping="adaptive")
    scheduled = dice_tf.PrivacyPlan(
        feedback_steps=1, schedule=PiecewiseSchedule([5], [1.0, 0.5]), **sizes
    )
    optimizer = dice_tf.DiceSGDOptimizer(0.1, l2_norm_clip=0.5, plan=scheduled)
    assert optimizer.mechanism.schedule == scheduled.schedule
    assert scheduled.noise_multiplier > plain.noise_multiplier
    assert "factors" in str(scheduled) and "adaptive threshold" in str(plan)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
