# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Samplers of owners: who is drawn, which rows are shown, what is refused."""

import copy
import dataclasses
import itertools
import pickle

import numpy as np
import pandas as pd
import pytest
from scipy import stats
import tensorflow as tf

import dice_tf
from dice_tf import accounting
from dice_tf.errors import AccountingError, MechanismError, SamplingError, UncheckedGradientsWarning
from dice_tf.ledger import admission, provenance
from dice_tf.sampling.owners import Owners, _subsets

RANDOM = np.random.default_rng(0)
# From one row to some fifteen, in any order.
IDS = RANDOM.permutation(np.concatenate([np.full(n, i) for i, n in enumerate([1, 2, 5, 15] * 15)]))
ROWS, COUNT, B, K = len(IDS), 60, 6, 3
CLASSES = {
    "poisson": dice_tf.PoissonSampling,
    "cyclic": dice_tf.CyclicPoissonSampling,
    "allocation": dice_tf.RandomAllocation,
}


def make(name, **arguments):
    defaults = dict(owner_ids=IDS, expected_batch_size=B, rows_per_owner=K)
    return CLASSES[name].of_owners(**{**defaults, **arguments})


def batches(sampling, epochs=1, **arguments):
    """Every batch as `(rows, weights)`, a unit in each row of both."""
    data = sampling.dataset(np.arange(ROWS), **arguments).repeat(epochs)
    size = K * arguments.get("views", 1)
    return [(x.numpy().reshape(-1, size), w.numpy().reshape(-1, size)) for x, _, w in data]


@pytest.mark.parametrize("name", CLASSES)
def test_a_unit_is_of_one_owner_and_holds_all_its_rows_or_as_many_as_may_be(name):
    for rows, weights in batches(make(name), epochs=4):
        owners = IDS[rows]
        assert (owners == owners[:, :1]).all()
        taking_part = weights.any(1)
        assert len(set(owners[taking_part, 0])) == taking_part.sum()
        for unit, weight in zip(rows[taking_part], weights[taking_part]):
            shown, has = unit[weight > 0], np.flatnonzero(IDS == IDS[unit[0]])
            assert len(set(shown)) == len(shown) == min(K, len(has)) and set(unit) <= set(has)
            assert (weight[weight > 0] == 1).all()


@pytest.mark.parametrize("name", CLASSES)
def test_owners_keep_their_group_and_marks_tell_it(name):
    sampling, group_of = make(name), {}
    seen = batches(sampling, epochs=6)
    for step, (rows, weights) in enumerate(seen):
        group = step % sampling.num_groups
        flat = tf.constant(weights.reshape(-1))
        assert int(provenance.count_marks(flat, K)) == group + 1
        for owner in IDS[rows[weights.any(1), 0]]:
            assert group_of.setdefault(owner, group) == group
    assert sampling.num_groups == 1 or set(group_of.values()) == {0, 1}


def test_marks_of_units_of_another_size_are_those_of_no_first_batch():
    for views in (1, 2, 4):
        ((_, weights), *_) = batches(make("poisson"), views=views)
        weights = tf.constant(weights.reshape(-1))
        for size in range(1, 4 * K + 1):
            count = int(provenance.count_marks(weights, size))
            assert (count == 1) == (size == views * K), (views, size)


def test_every_owner_is_drawn_with_the_same_probability_whatever_it_has():
    sampling, epochs = make("poisson"), 150
    drawn = np.zeros(COUNT, int)
    for rows, weights in batches(sampling, epochs):
        drawn[IDS[rows[weights.any(1), 0]]] += 1
    steps = epochs * sampling.steps_per_epoch
    probabilities = stats.binom.cdf(drawn, steps, B / COUNT)
    assert stats.kstest(probabilities, "uniform").pvalue > 1e-3
    few, many = drawn[0::4].sum(), drawn[3::4].sum()  # Owners of 1 and of 15 rows.
    expected = 15 * steps * B / COUNT
    assert max(abs(few - expected), abs(many - expected)) < 5 * np.sqrt(expected)


def test_rows_of_an_owner_are_shown_equally_often_and_afresh():
    sampling = make("poisson")
    owner = 3
    has = np.flatnonzero(IDS == owner)
    shown, times = np.zeros(ROWS, int), 0
    for rows, weights in batches(sampling, epochs=300):
        unit = (IDS[rows[:, 0]] == owner) & weights.any(1)
        shown[rows[unit].ravel()] += 1
        times += unit.sum()
    assert stats.chisquare(shown[has]).pvalue > 1e-3
    assert shown[has].sum() == K * times > 400


@pytest.mark.parametrize("size, count", [(4, 2), (5, 3), (3, 3), (6, 1)])
def test_subsets_are_uniform(size, count):
    draws = 6000
    chosen = _subsets(np.full(draws, size), count, np.random.default_rng(1))
    assert all(len(set(row)) == count for row in chosen)
    subsets = list(itertools.combinations(range(size), count))
    found = [tuple(sorted(row)) for row in chosen]
    assert stats.chisquare([found.count(s) for s in subsets]).pvalue > 1e-3 or len(subsets) == 1


@pytest.mark.parametrize(
    "ids",
    [
        IDS.tolist(), IDS.astype(str), [f"person {i}" for i in IDS], pd.Series(IDS),
        pd.Series([f"é{i}" for i in IDS]), pd.Categorical(IDS.astype(str)), tf.constant(IDS),
        tf.constant([str(i) for i in IDS]), IDS.astype("uint8"),
    ],
    ids=lambda ids: type(ids).__name__,
)  # fmt: skip
def test_ids_of_every_kind_group_alike(ids):
    owners = Owners(ids, K)
    assert (owners.count, owners.num_rows) == (COUNT, ROWS)
    rows, weights = owners.rows_of(np.arange(COUNT), np.ones(COUNT), np.random.default_rng(0))
    groups = IDS[rows].reshape(-1, K)
    assert (groups == groups[:, :1]).all() and len(set(groups[:, 0])) == COUNT
    assert sorted(weights.reshape(-1, K).sum(1)) == sorted(np.minimum(np.bincount(IDS), K))


def test_equal_objects_draw_alike_from_a_seed_and_copies_keep_their_owners():
    first, second = make("cyclic", seed=4), make("cyclic", seed=4)
    assert first == second and hash(first) == hash(second)
    for (rows, weights), (others, same) in zip(batches(first, 2), batches(second, 2), strict=True):
        np.testing.assert_array_equal(rows, others)
        np.testing.assert_array_equal(weights, same)
    assert copy.copy(first) is first
    again = pickle.loads(pickle.dumps(first))
    assert again == first and again.owners.num_rows == ROWS
    assert dataclasses.replace(first, expected_batch_size=5).rows_per_unit == K
    examples = dice_tf.CyclicPoissonSampling(COUNT, B, seed=4)
    assert examples != first and make("cyclic", seed=4, rows_per_owner=2) != first
    assert make("cyclic", seed=4, owner_ids=np.roll(IDS, 1)) != first
    assert provenance.sampling_name(examples) != provenance.sampling_name(first)
    assert "owner_ids" not in repr(first) and repr(first.owners) == f"Owners(rows_per_owner={K})"


def test_rows_of_other_owners_are_rows_in_another_order():
    order = lambda ids: admission.row_order(
        admission.sources(make("poisson", owner_ids=ids).dataset(np.arange(ROWS)))
    )
    # As strings ids sort in another way, so that owners have other numbers, and other groups.
    assert order(IDS) == order(IDS + 100) not in (order(np.roll(IDS, 1)), order(IDS.astype(str)))


def test_views_are_drawn_for_each_row_and_targets_go_with_them():
    sampling, x = make("poisson"), np.arange(ROWS, dtype="float32")[:, None]
    augment = lambda rows: rows + tf.random.uniform(tf.shape(rows), 0.0, 0.5)
    data = sampling.dataset(x, np.arange(ROWS) * 7, np.arange(ROWS) + 1.0, views=2, augment=augment)
    for seen, y, weights in data:
        rows = np.floor(seen.numpy()[:, 0]).astype(int)
        np.testing.assert_array_equal(y, rows * 7)
        real = weights.numpy() > 0
        np.testing.assert_array_equal(weights.numpy()[real], rows[real] + 1)
        pairs = rows.reshape(-1, 2)
        np.testing.assert_array_equal(pairs[:, 0], pairs[:, 1])
        assert (np.diff(seen.numpy()[:, 0].reshape(-1, 2), axis=1) != 0).all()


@pytest.mark.parametrize(
    "arguments, match",
    [
        (dict(owner_ids=[[1], [2]]), r"owner_ids.*\(2, 1\)"),
        (dict(owner_ids=[]), r"owner_ids.*\(0,\)"),
        (dict(owner_ids=[1.0, np.nan] * 20), "owner_ids.*float"),
        (dict(owner_ids=["a", None] * 20), "owner_ids"),
        (dict(rows_per_owner=0), "rows_per_owner=0"),
        (dict(rows_per_owner=2.5), "rows_per_owner=2.5"),
        (dict(expected_batch_size=61), "expected_batch_size=61"),
    ],
)
def test_bad_owners_are_refused(arguments, match):
    with pytest.raises(SamplingError, match=match):
        make("poisson", **arguments)


def test_contradictions_are_refused():
    owners = Owners(IDS, K)
    with pytest.raises(SamplingError, match="num_examples=59 with 60 owners.*of_owners"):
        dice_tf.PoissonSampling(59, B, owners=owners)
    with pytest.raises(SamplingError, match="rows, not owners.*RandomAllocation"):
        dice_tf.ShuffledEpochs.of_owners(IDS, expected_batch_size=B, rows_per_owner=K)
    with pytest.raises(SamplingError, match=f"num_examples|{ROWS}"):
        make("cyclic").dataset(np.zeros([COUNT, 2]))


@pytest.mark.parametrize(
    "arguments, match",
    [
        (dict(views=0), "views=0"),
        (dict(views=1.5), "views=1.5"),
        (dict(augment="flip"), "augment='flip'"),
        (dict(augment=lambda x: (x, x)), "targets are the same for all views.*tuple"),
        (dict(augment=lambda x: x[:2]), "as many rows.*2 for 8"),
        (dict(augment=lambda x: x - tf.reduce_mean(x, 0)), "mixes rows"),
        (dict(augment=lambda x: 0.9 * x + 0.1 * tf.random.shuffle(x)), "mixes rows"),
        (dict(augment=lambda x: tf.where(x > 99, x, x[::-1])), "mixes rows"),
    ],
)
def test_bad_views_are_refused_before_the_first_batch(arguments, match):
    with pytest.raises(SamplingError, match=match):
        make("poisson").dataset(np.ones([ROWS, 4], "float32"), views=2, **arguments) if (
            "views" not in arguments
        ) else make("poisson").dataset(np.ones([ROWS, 4], "float32"), **arguments)


def test_an_augment_that_takes_no_floats_is_said_to_be_unchecked():
    images = np.zeros([make("poisson").num_rows, 2], "uint8")
    with pytest.warns(UncheckedGradientsWarning, match="keeps rows apart could not be seen"):
        make("poisson").dataset(images, views=2, augment=tf.bitwise.invert)


def test_stock_augmentations_pass():
    import keras

    images = RANDOM.uniform(size=(ROWS, 8, 8, 3)).astype("float32")
    layers = [
        keras.layers.RandomFlip(), keras.layers.RandomTranslation(0.2, 0.2),
        keras.layers.RandomContrast(0.3, value_range=(0, 1)), keras.layers.GaussianNoise(0.1),
        tf.image.random_flip_left_right, lambda x: tf.image.random_brightness(x, 0.2),
        lambda x: tf.cast(tf.cast(x * 255, tf.uint8), tf.float32) / 255,
    ]  # fmt: skip
    for augment in layers:
        data = make("poisson", seed=1).dataset(images, views=2, augment=augment)
        assert next(iter(data))[0].shape[1:] == (8, 8, 3)
    whole = images.astype("uint8")
    flipped = make("poisson").dataset(whole, views=2, augment=tf.image.random_flip_up_down)
    assert next(iter(flipped))[0].dtype == tf.uint8


def test_epsilon_is_that_of_as_many_examples_and_the_statement_is_about_owners():
    owners, examples = make("cyclic"), dice_tf.CyclicPoissonSampling(COUNT, B)
    arguments = dict(l2_norm_clip=1.0, noise_multiplier=2.0, expected_batch_size=B)
    of_owners = dice_tf.DiceMechanism(**arguments, rows_per_unit=2 * K)
    one = dice_tf.DiceMechanism(**arguments)
    epsilon = accounting.compute_epsilon(of_owners, owners, 40, 1e-3)
    assert epsilon == accounting.compute_epsilon(one, examples, 40, 1e-3)
    statement = accounting.privacy_statement(of_owners, owners, 40, 1e-3)
    words = " ".join(statement.split())
    assert "one owner is added or removed" in words and "number of owners N 60" in words
    assert "at most 3 are used at a time" in words and "2 views of each row" in words
    assert "example" not in words
    noise = accounting.calibrate_noise_multiplier(2.0, 1e-3, owners, 40)
    assert noise == accounting.calibrate_noise_multiplier(2.0, 1e-3, examples, 40)
    for mechanism in (one, dice_tf.DiceMechanism(**arguments, rows_per_unit=2)):
        with pytest.raises(AccountingError, match="rows_per_unit=.*rows_per_unit=3"):
            accounting.compute_epsilon(mechanism, owners, 40, 1e-3)
    with pytest.raises(AccountingError, match="different units"):
        accounting.compose_epsilon([(of_owners, owners, 4), (one, examples, 4)], 1e-3)
    with pytest.raises(MechanismError, match="num_microbatches=2.*rows_per_unit=3"):
        dice_tf.DiceMechanism(**arguments, rows_per_unit=3, num_microbatches=2)
    with pytest.raises(MechanismError, match="rows_per_unit=0"):
        dice_tf.DiceMechanism(**arguments, rows_per_unit=0)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
