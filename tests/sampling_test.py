# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws have exactly the law that is accounted for, and are counted."""

import collections
import copy
import itertools

import numpy as np
import pytest
from scipy import stats

from dice_tf import sampling as sampling_lib
from dice_tf.errors import SamplingError
from dice_tf.ledger import provenance
from dice_tf.sampling import CyclicPoissonSampling, PoissonSampling, ShuffledEpochs

ALL = [PoissonSampling, CyclicPoissonSampling, ShuffledEpochs]
NUMBERS = np.arange(50)


def indices(sampling, epochs=1):
    """Row numbers that are drawn, step by step, by going through a data set `epochs` times."""
    data = sampling.dataset(np.arange(sampling.num_examples), planned_epochs=epochs).repeat(epochs)
    return [x[w > 0] for x, _, w in data.map(lambda x, _, w: (x, 0, w)).as_numpy_iterator()]


def inclusion(sampling, epochs):
    """Boolean `[steps, num_examples]`: who was drawn when."""
    steps = indices(sampling, epochs)
    drawn = np.zeros((len(steps), sampling.num_examples), dtype=int)
    for step, rows in enumerate(steps):
        np.add.at(drawn[step], rows, 1)
    assert drawn.max() <= 1, "an example was drawn twice in one step"
    return drawn.astype(bool)


@pytest.mark.parametrize(
    "sampling, probability, steps_per_epoch, rounds",
    [
        (PoissonSampling(60_000, 600), 0.01, 100, 45),
        (PoissonSampling(100, 70), 0.7, 1, 45),
        (CyclicPoissonSampling(60_000, 2048), 2 * 2048 / 60_000, 30, 23),
        (CyclicPoissonSampling(60_000, 512, num_groups=4), 4 * 512 / 60_000, 116, 12),
        (CyclicPoissonSampling(10, 5), 1.0, 2, 23),
        (CyclicPoissonSampling(60_000, 2048, num_groups=1), 2048 / 60_000, 29, 45),
        (ShuffledEpochs(29_404, 32), 1.0, 919, 1),
        (ShuffledEpochs(100, 32), 1.0, 4, 12),
    ],
)
def test_what_is_accounted(sampling, probability, steps_per_epoch, rounds):
    assert sampling.sampling_probability == pytest.approx(probability, rel=1e-12)
    assert sampling.steps_per_epoch == steps_per_epoch
    assert sampling.rounds(45) == rounds
    assert sampling.rounds(0) == 0
    assert sampling.steps(3) == 3 * steps_per_epoch
    assert sampling.steps_per_epoch % sampling.num_groups == 0


def test_case_15_probability_comes_from_the_declared_size():
    # 1,000 examples in batches of 300: a loader has 3 or 4 batches, B/N is 0.3.
    assert PoissonSampling(1000, 300).sampling_probability == 0.3


def test_rounds_is_the_largest_number_of_entries_of_one_example():
    for sampling in (CyclicPoissonSampling(12, 4, num_groups=3), ShuffledEpochs(12, 5)):
        drawn = inclusion(sampling, epochs=6)
        for steps in range(len(drawn) + 1):
            assert drawn[:steps].sum(axis=0).max() <= sampling.rounds(steps)
    # The bound is reached: with probability 1 every example enters in every cycle.
    drawn = inclusion(CyclicPoissonSampling(12, 4, num_groups=3), epochs=6)
    assert drawn.sum(axis=0).max() == CyclicPoissonSampling(12, 4, num_groups=3).rounds(len(drawn))


def test_entries_are_separated_only_by_enough_groups():
    assert CyclicPoissonSampling(100, 10).separates_entries(1)
    assert not CyclicPoissonSampling(100, 10).separates_entries(2)
    assert CyclicPoissonSampling(100, 10, num_groups=4).separates_entries(3)
    assert not CyclicPoissonSampling(100, 10, num_groups=1).separates_entries(1)
    assert not PoissonSampling(100, 10).separates_entries(1)
    assert not ShuffledEpochs(100, 10).separates_entries(1)


def test_equal_parameters_make_equal_objects():
    assert PoissonSampling(100, 10) == PoissonSampling(100, 10)
    assert hash(CyclicPoissonSampling(100, 10)) == hash(CyclicPoissonSampling(100, 10))
    assert CyclicPoissonSampling(100, 10, 2) != CyclicPoissonSampling(100, 10, 5)
    assert PoissonSampling(100, 10) != ShuffledEpochs(100, 10)
    assert PoissonSampling(np.int64(100), 10) == PoissonSampling(100, 10)
    with pytest.raises(AttributeError):
        PoissonSampling(100, 10).num_examples = 50
    assert repr(PoissonSampling(100, 10)) == (
        "PoissonSampling(num_examples=100, expected_batch_size=10, seed=None)"
    )


@pytest.mark.parametrize(
    "make, echoed",
    [
        (lambda: PoissonSampling(100, 101), ["expected_batch_size=101", "num_examples=100"]),
        (lambda: ShuffledEpochs(100, 101), ["expected_batch_size=101", "num_examples=100"]),
        (lambda: CyclicPoissonSampling(100, 51), ["num_groups=2", "expected_batch_size=51"]),
        (lambda: CyclicPoissonSampling(100, 10, num_groups=0), ["num_groups=0"]),
        (lambda: PoissonSampling(0, 10), ["num_examples=0"]),
        (lambda: PoissonSampling(100, 0), ["expected_batch_size=0"]),
        (lambda: PoissonSampling(100, 10.5), ["expected_batch_size=10.5", "float"]),
        (lambda: PoissonSampling(True, 1), ["num_examples=True"]),
        (lambda: PoissonSampling(100, 10, seed=-1), ["seed=-1"]),
        (lambda: PoissonSampling(100, 10, seed="a"), ["seed='a'"]),
        (lambda: PoissonSampling(100, 10).rounds(-1), ["steps=-1"]),
        (lambda: PoissonSampling(100, 10).steps(1.5), ["epochs=1.5"]),
        (lambda: PoissonSampling(9, 3).dataset(np.ones(9), planned_epochs=0), ["epochs=0"]),
    ],
)
def test_contradictory_parameters_are_refused(make, echoed):
    with pytest.raises(SamplingError) as caught:
        make()
    for text in echoed:
        assert text in str(caught.value)


def test_every_example_is_drawn_with_the_stated_probability_by_its_own_coin():
    sampling = PoissonSampling(40, 10, seed=3)
    drawn = inclusion(sampling, epochs=1000)
    steps, q = len(drawn), sampling.sampling_probability
    sizes, counts = drawn.sum(axis=1), drawn.sum(axis=0)
    assert q == 0.25 and steps == 4000

    # Sizes are Binomial(N, q): chi-square over the sizes that are expected 10 times or more.
    support = np.arange(41)
    expected = steps * stats.binom.pmf(support, 40, q)
    observed = np.bincount(sizes, minlength=41)
    common = expected >= 10
    fit = stats.chisquare(
        [*observed[common], observed[~common].sum()], [*expected[common], expected[~common].sum()]
    )
    assert fit.pvalue > 1e-4

    # Every example equally often, with the spread of independent coins (40 z-scores).
    z = (counts - steps * q) / np.sqrt(steps * q * (1 - q))
    assert stats.kstest(z, "norm").pvalue > 1e-4
    assert 0.4 < np.var(z) < 2.0

    # Pairs are independent within a step and across steps: all correlations are noise.
    signs = (drawn - q) / np.sqrt(q * (1 - q))
    within = (signs.T @ signs / np.sqrt(steps))[np.triu_indices(40, k=1)]
    across = (signs[1:].T @ signs[:-1] / np.sqrt(steps - 1)).ravel()
    for correlations in (within, across):
        assert stats.kstest(correlations, "norm").pvalue > 1e-4
        assert np.abs(correlations).max() < 5.0


def test_the_law_test_would_notice_a_fixed_batch_size():
    # The same statistic on 10 of 40 without replacement: sizes never vary.
    expected = 4000 * stats.binom.pmf(np.arange(41), 40, 0.25)
    observed = np.where(np.arange(41) == 10, 4000, 0)
    common = expected >= 10
    fit = stats.chisquare(
        [*observed[common], observed[~common].sum()], [*expected[common], expected[~common].sum()]
    )
    assert fit.pvalue < 1e-300


def test_groups_take_turns_and_keep_their_members():
    sampling = CyclicPoissonSampling(60, 15, num_groups=3, seed=0)
    first = sampling.dataset(np.arange(60))
    second = sampling.dataset(np.arange(60))
    group_of, order = {}, []
    for _ in range(20):
        for data in (first, second):
            next(iter(data))  # Keras looks at the first batch and discards the iterator.
            for step, (x, _, w) in enumerate(data):
                order.append(int(provenance.count_marks(w)) - 1)
                assert order[-1] == step % 3
                for row in x.numpy()[w.numpy() > 0]:
                    assert group_of.setdefault(row, step % 3) == step % 3
    assert len(group_of) == 60 and len(order) == 40 * sampling.steps_per_epoch


def test_groups_are_assigned_by_independent_uniform_choices():
    sizes = []
    for seed in range(400):
        sampling = CyclicPoissonSampling(30, 5, num_groups=3, seed=seed)
        groups = sampling._groups()
        assert sorted(itertools.chain(*groups)) == list(range(30))
        sizes.append(len(groups[0]))
    # Binomial(30, 1/3), not always 10: a balanced split would tie examples together.
    z = (np.asarray(sizes) - 10) / np.sqrt(30 * (1 / 3) * (2 / 3))
    assert abs(z.mean()) * np.sqrt(400) < 4 and 0.8 < z.var() < 1.2


def test_members_of_the_active_group_are_drawn_with_m_times_the_probability():
    sampling = CyclicPoissonSampling(40, 8, num_groups=2, seed=5)
    drawn = inclusion(sampling, epochs=500)
    groups = sampling._groups()
    for g in range(2):
        active = drawn[g::2][:, groups[g]]
        assert not drawn[1 - g :: 2][:, groups[g]].any()
        steps, q = len(active), sampling.sampling_probability
        z = (active.sum(axis=0) - steps * q) / np.sqrt(steps * q * (1 - q))
        assert np.abs(z).max() < 4.5
        fit = stats.kstest(z, "norm")
        assert fit.pvalue > 1e-4


def test_unseeded_objects_assign_differently_and_one_object_never_changes_its_mind():
    one, other = CyclicPoissonSampling(500, 5), CyclicPoissonSampling(500, 5)
    members = lambda s: [g.tolist() for g in s._groups()]
    assert members(one) == members(one) == members(copy.deepcopy(one))
    assert members(one) != members(other)
    assert one.assignment != other.assignment and one.assignment == copy.copy(one).assignment
    seeded = [CyclicPoissonSampling(500, 5, seed=1) for _ in range(2)]
    assert members(seeded[0]) == members(seeded[1])
    assert members(CyclicPoissonSampling(500, 5, seed=2)) != members(seeded[0])


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("seed", [None, 11])
def test_every_iteration_is_a_fresh_draw(kind, seed):
    sampling = kind(2000, 100, seed=seed)
    data = sampling.dataset(np.arange(2000))
    again = sampling.dataset(np.arange(2000))
    runs = [tuple(b[0].numpy().tobytes() for b in d) for d in (data, data, again, data)]
    assert len(set(runs)) == 4
    assert len(set(itertools.chain(*runs))) == 4 * sampling.steps_per_epoch


@pytest.mark.parametrize("kind", ALL)
def test_seeded_draws_are_reproducible_and_unseeded_ones_are_not(kind):
    draw = lambda seed: [rows.tolist() for rows in indices(kind(300, 30, seed=seed), epochs=2)]
    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert draw(None) != draw(None)


@pytest.mark.parametrize("kind", ALL)
def test_interleaved_iterators_do_not_disturb_each_other(kind):
    apart = kind(200, 20, seed=4)
    data = apart.dataset(np.arange(200))
    one, two = ([b[0].numpy().tolist() for b in data] for _ in range(2))
    data = kind(200, 20, seed=4).dataset(np.arange(200))
    pairs = [(a[0].numpy().tolist(), b[0].numpy().tolist()) for a, b in zip(iter(data), iter(data))]
    assert sorted(map(str, zip(*pairs))) == sorted(map(str, (tuple(one), tuple(two))))


def test_a_draw_is_never_cut_and_sizes_are_few():
    # Padded for one epoch of 10 steps, iterated 100 times: some draws need the second size.
    sampling = PoissonSampling(4000, 400, seed=2)
    data = sampling.dataset(np.arange(4000), planned_epochs=1)
    drawn, sizes = [], collections.Counter()
    for _ in range(100):
        for x, _, w in data:
            drawn.append(int((w > 0).numpy().sum()))
            sizes[x.shape[0]] += 1
            assert w.shape[0] == x.shape[0] and drawn[-1] < x.shape[0]
    smallest = min(sizes)
    assert max(drawn) > smallest, "no draw exceeded the smallest padded size"
    expected = stats.binom.sf(smallest - 1, 4000, 0.1)
    overflow = sum(n for size, n in sizes.items() if size > smallest) / len(drawn)
    assert overflow == pytest.approx(expected, abs=4 * np.sqrt(expected / len(drawn)))
    assert len(sizes) <= 3 and all(size % 8 == 0 for size in sizes)
    z = (np.asarray(drawn) - 400) / np.sqrt(4000 * 0.1 * 0.9)
    assert abs(z.mean()) * np.sqrt(len(z)) < 4 and 0.8 < z.var() < 1.2


@pytest.mark.parametrize("kind", [PoissonSampling, CyclicPoissonSampling])
def test_planned_runs_rarely_need_a_second_size(kind):
    overflown = 0
    for seed in range(40):
        begin, draw, _ = kind(200, 20, seed=seed).draw_plan(20)
        iteration = begin()
        overflown += len({len(draw(iteration, np.int64(step))[0]) for step in range(20)}) > 1
    # At most Binomial(40, 0.1).
    assert overflown <= stats.binom.ppf(1 - 1e-4, 40, 0.1)


def test_empty_draws_are_batches_of_padding():
    data = PoissonSampling(30, 1, seed=0).dataset(np.arange(30), np.arange(30))
    sizes = [int((b[2] > 0).numpy().sum()) for _ in range(5) for b in data]
    assert 0 in sizes and all(b[0].shape[0] == 8 for b in data)


def test_padding_has_weight_zero_and_marks_the_group():
    sampling = CyclicPoissonSampling(100, 10, num_groups=5)
    for step, (_, _, w) in enumerate(sampling.dataset(np.arange(100))):
        w = w.numpy()
        assert w.dtype == np.float32
        assert set(np.unique(w)) == {0.0, 1.0}
        assert (np.signbit(w) & (w == 0)).sum() == step % 5 + 1
        assert not np.signbit(w[w > 0]).any()


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("replicas", [1, 3])
def test_no_row_is_twice_in_a_batch_even_as_padding(kind, replicas, monkeypatch):
    monkeypatch.setattr(
        sampling_lib.batches.multi_worker, "join_workers", lambda sampling: replicas
    )
    padded = 0
    for _ in range(20):
        for x, _, w in kind(100, 11).dataset(np.arange(100)):
            assert len(x) % replicas == 0 and len(set(x.numpy().tolist())) == len(x)
            padded += int((w == 0).numpy().sum())
    # Shuffled batches are filled up for replicas only: 11 to 12, the last one from 1 to 3.
    expected = 20 * (9 + 2) * (replicas - 1) / 2
    assert padded == expected if kind is ShuffledEpochs else padded > 100


def test_shuffled_epochs_visit_everyone_once_without_a_mark():
    sampling = ShuffledEpochs(70, 16)
    data = sampling.dataset(np.arange(70))
    assert ShuffledEpochs(64, 16).dataset(np.arange(64)).element_spec[0].shape == (16,)
    assert [len(x) for x, _, _ in data] == [16, 16, 16, 16, 6]
    orders = []
    for _ in range(3):
        batches = list(data)
        assert [int((w > 0).numpy().sum()) for _, _, w in batches] == [16, 16, 16, 16, 6]
        assert all(int(provenance.count_marks(w)) == 0 for _, _, w in batches)
        orders.append(np.concatenate([x.numpy()[w.numpy() > 0] for x, _, w in batches]))
        assert sorted(orders[-1]) == list(range(70))
    assert not np.array_equal(orders[0], orders[1])


def test_every_draw_is_counted():
    sampling = CyclicPoissonSampling(50, 10)
    assert sampling.draws == 0
    data = sampling.dataset(NUMBERS)
    list(data), list(data)
    assert sampling.draws == 2 * sampling.steps_per_epoch
    cached = sampling.dataset(NUMBERS).cache()
    list(cached), list(cached)
    assert sampling.draws == 3 * sampling.steps_per_epoch
    assert sampling_lib.PoissonSampling(50, 10).draws == 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
