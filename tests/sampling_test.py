# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws have exactly the law that is accounted for, and pipelines deliver them whole."""

import collections
import copy
import itertools
import json

import keras
import numpy as np
import pytest
from scipy import stats
import tensorflow as tf

from dice_tf import provenance, sampling as sampling_lib
from dice_tf.errors import SamplingError
from dice_tf.sampling import CyclicPoissonSampling, PoissonSampling, ShuffledEpochs

ALL = [PoissonSampling, CyclicPoissonSampling, ShuffledEpochs]


def indices(sampling, epochs=1):
    """Row numbers that are drawn, step by step, by going through a data set `epochs` times."""
    data = sampling.dataset(np.arange(sampling.num_examples), epochs=epochs).repeat(epochs)
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
        (lambda: PoissonSampling(9, 3).dataset(np.ones(9), epochs=0), ["epochs=0"]),
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
    pairs = [
        (a[0].numpy().tolist(), b[0].numpy().tolist()) for a, b in zip(iter(data), iter(data))
    ]
    assert sorted(map(str, zip(*pairs))) == sorted(map(str, (tuple(one), tuple(two))))


def test_a_draw_is_never_cut_and_sizes_are_few():
    # Padded for one epoch of 10 steps, iterated 100 times: some draws need the second size.
    sampling = PoissonSampling(4000, 400, seed=2)
    data = sampling.dataset(np.arange(4000), epochs=1)
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
        begin, draw, _ = kind(200, 20, seed=seed)._plan(20)
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


def test_shuffled_epochs_visit_everyone_once_without_a_mark():
    sampling = ShuffledEpochs(70, 16)
    data = sampling.dataset(np.arange(70))
    assert data.element_spec[0].shape == (16,)
    orders = []
    for _ in range(3):
        batches = list(data)
        assert [int((w > 0).numpy().sum()) for _, _, w in batches] == [16, 16, 16, 16, 6]
        assert all(int(provenance.count_marks(w)) == 0 for _, _, w in batches)
        orders.append(np.concatenate([x.numpy()[w.numpy() > 0] for x, _, w in batches]))
        assert sorted(orders[-1]) == list(range(70))
    assert not np.array_equal(orders[0], orders[1])


Pair = collections.namedtuple("Pair", ["left", "right"])


class Source:
    """Random access to (features, label) pairs, one element at a time."""

    def __init__(self, element, size=50):
        self.element, self.size = element, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.element(index)


class BulkSource(Source):
    """The same, many at a time; single access is only used to learn the structure."""

    def __getitem__(self, index):
        assert index == 0
        return super().__getitem__(index)

    def __getitems__(self, indices):
        return [self.element(i) for i in indices]


def image(i):
    return np.full((2, 3), i, dtype=np.float32)


IMAGES = np.stack([image(i) for i in range(50)])
NUMBERS = np.arange(50)


@pytest.mark.parametrize(
    "x, y",
    [
        (IMAGES, NUMBERS),
        (tf.constant(IMAGES), tf.constant(NUMBERS)),
        (IMAGES, NUMBERS.tolist()),
        ({"image": IMAGES, "id": NUMBERS}, {"out": NUMBERS}),
        ((IMAGES, NUMBERS), NUMBERS),
        ([IMAGES, NUMBERS], [NUMBERS, IMAGES]),
        (Pair(IMAGES, NUMBERS), NUMBERS),
        (Source(lambda i: (image(i), i)), None),
        (BulkSource(lambda i: (image(i), i)), None),
        ([(image(i), i) for i in range(50)], None),
        (Source(lambda i: ({"image": image(i), "id": i}, i)), None),
        (Source(image), NUMBERS),
        (Source(lambda i: {"image": tf.constant(image(i)), "id": i}), None),
    ],
)
def test_rows_are_gathered_together(x, y):
    data = PoissonSampling(50, 10).dataset(x, y)
    rows = 0
    for batch_x, batch_y, w in data:
        present = w.numpy() > 0
        leaves = tf.nest.flatten([batch_x, [] if batch_y is None else batch_y])
        columns = [leaf.numpy().reshape(len(w), -1).astype(float) for leaf in leaves]
        assert len(columns) >= 2
        for column in columns:
            np.testing.assert_array_equal(column[:, 0], columns[0][:, 0])
            np.testing.assert_array_equal(column.min(axis=1), column.max(axis=1))
        assert len(set(columns[0][present, 0])) == present.sum()
        assert columns[0].min() >= 0 and columns[0].max() < 50
        rows += present.sum()
    assert rows > 20
    spec = data.element_spec
    for leaf in tf.nest.flatten(spec):
        if isinstance(leaf, tf.TensorSpec):
            assert leaf.shape[1:].is_fully_defined()


def test_structure_types_and_dtypes_are_kept():
    sampling = PoissonSampling(50, 10)
    x, y, w = sampling.dataset(Pair(IMAGES, NUMBERS), [NUMBERS, IMAGES]).element_spec
    assert isinstance(x, Pair) and isinstance(y, tuple)
    assert x.left == tf.TensorSpec((None, 2, 3), tf.float32) and x.right.dtype == tf.int64
    # Float64 follows `fit` on arrays; other types are left alone.
    assert sampling.dataset(NUMBERS.astype("float64")).element_spec[0].dtype == tf.float32
    assert sampling.dataset(NUMBERS.astype("uint8")).element_spec[0].dtype == tf.uint8
    assert sampling.dataset(Source(lambda i: (i / 2, i))).element_spec[0].dtype == tf.float32
    words = np.asarray([f"word {i}" for i in range(50)])
    for source in (words, words.tolist()):
        x, _, w = next(iter(sampling.dataset(source)))
        assert x.dtype == tf.string and x.numpy()[0].startswith(b"word ")


def test_ragged_rows_are_gathered():
    lengths = np.arange(50) % 4
    ragged = tf.RaggedTensor.from_row_lengths(np.repeat(NUMBERS, lengths), lengths)
    x, y, w = next(iter(PoissonSampling(50, 10).dataset(ragged, NUMBERS)))
    for row, number in zip(x.to_list(), y.numpy().tolist()):
        assert row == [number] * (number % 4)


def test_elements_that_are_no_pairs_can_be_mapped():
    source = Source(lambda i: {"image": image(i), "label": i})
    data = PoissonSampling(50, 10).dataset(source)
    data = data.map(lambda x, _, w: (x["image"], x["label"], w))
    x, y, w = next(iter(data))
    np.testing.assert_array_equal(x.numpy()[:, 0, 0], y.numpy())
    assert int(provenance.count_marks(w)) == 1


@pytest.mark.parametrize(
    "x, y, echoed",
    [
        (np.ones((49, 2)), None, ["`x`", "num_examples=50", "49 rows"]),
        (IMAGES, np.ones(51), ["`y`", "num_examples=50", "51 rows"]),
        ({"a": IMAGES, "b": {"c": np.ones(7)}}, None, ["`x['b']['c']`", "7 rows"]),
        ((IMAGES, np.ones(7)), None, ["`x[1]`", "7 rows"]),
        (IMAGES, np.float32(3.0), ["`y`", "None rows"]),
        (Source(image, size=51), None, ["num_examples=50", "51 elements"]),
        ([(1, 2)] * 3, None, ["num_examples=50", "3 elements"]),
        (tf.data.Dataset.from_tensor_slices(IMAGES), None, ["tf.data.Dataset", "arrays"]),
        (tf.sparse.from_dense(np.eye(50)), None, ["`x`", "SparseTensor"]),
    ],
)
def test_case_15_data_that_contradicts_the_declaration_is_refused(x, y, echoed):
    with pytest.raises(SamplingError) as caught:
        PoissonSampling(50, 10).dataset(x, y)
    for text in echoed:
        assert text in str(caught.value)


def test_elements_of_different_shape_are_refused_with_the_shapes():
    data = PoissonSampling(50, 25).dataset(Source(lambda i: (np.ones(i % 2 + 1), i)))
    with pytest.raises(tf.errors.OpError, match=r"one shape each(.|\n)*\(1,\), \(2,\)"):
        list(data)


def test_user_weights_are_gathered_and_carry_no_mark():
    weights = np.where(NUMBERS % 5 == 0, -0.0, NUMBERS / 10).astype("float64")
    data = CyclicPoissonSampling(50, 10).dataset(IMAGES, NUMBERS, sample_weight=weights)
    seen = 0
    for step, (_, y, w) in enumerate(data):
        assert int(provenance.count_marks(w)) == step % 2 + 1
        y, w = y.numpy(), w.numpy()
        present = w > 0
        np.testing.assert_allclose(w[present], y[present] / 10, rtol=1e-6)
        seen += present.sum()
    assert seen > 10


def test_weights_of_several_outputs_all_carry_the_mark():
    weights = {"b": np.ones(50), "a": NUMBERS / 10}
    data = PoissonSampling(50, 10).dataset(IMAGES, {"a": NUMBERS, "b": NUMBERS}, weights)
    for _, y, w in data:
        assert set(w) == {"a", "b"}
        assert [int(provenance.count_marks(leaf)) for leaf in w.values()] == [1, 1]
        drawn = w["b"].numpy() == 1
        np.testing.assert_allclose(w["a"].numpy()[drawn], y["a"].numpy()[drawn] / 10, rtol=1e-6)


@pytest.mark.parametrize(
    "weights, echoed",
    [
        (np.where(NUMBERS == 7, -0.5, 1.0), ["-0.5", "index 7"]),
        (np.where(NUMBERS == 9, np.nan, 1.0), ["nan", "index 9"]),
        (np.where(NUMBERS == 9, np.inf, 1.0), ["inf", "index 9"]),
        (np.ones((50, 2)), ["(50, 2)", "(50,)"]),
        ({"a": np.ones(50), "b": np.ones(49)}, ["sample_weight['b']", "(49,)"]),
    ],
)
def test_bad_weights_are_refused(weights, echoed):
    with pytest.raises(SamplingError) as caught:
        PoissonSampling(50, 10).dataset(IMAGES, NUMBERS, weights)
    for text in echoed:
        assert text in str(caught.value)


@pytest.mark.parametrize("seed", [None, 1])
def test_several_workers_that_do_not_meet_are_refused(monkeypatch, seed):
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    with pytest.raises(SamplingError, match="2 workers"):
        PoissonSampling(50, 10, seed=seed).dataset(IMAGES)


def linear_model():
    model = keras.Sequential([keras.Input((2, 3)), keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-5), loss="mse")
    return model


class StepCounter(keras.callbacks.Callback):
    """Remembers the number of steps that Keras announces and makes."""

    def __init__(self):
        super().__init__()
        self.batches = []

    def on_epoch_begin(self, epoch, logs=None):
        self.batches.append(0)

    def on_train_batch_end(self, batch, logs=None):
        self.batches[-1] += 1


@pytest.mark.parametrize("kind", ALL)
def test_keras_fits_the_data_set(kind):
    sampling = kind(50, 8)
    model, counter = linear_model(), StepCounter()
    data = sampling.dataset(IMAGES, NUMBERS, epochs=3)
    augmented = data.map(lambda x, y, w: (x + tf.random.normal(tf.shape(x)), y, w))
    history = model.fit(augmented, epochs=3, verbose=0, callbacks=[counter])
    steps = sampling.steps_per_epoch
    assert history.params["steps"] == steps == len(data)
    assert counter.batches == [steps] * 3
    assert int(model.optimizer.iterations) == 3 * steps
    assert len(history.history["loss"]) == 3


def test_keras_trains_on_features_alone_if_the_model_brings_its_loss():
    class Energy(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            self.add_loss(tf.reduce_mean(self.dense(keras.ops.reshape(x, (-1, 6))) ** 2))
            return x

    model = Energy()
    model.compile(keras.optimizers.SGD(1e-5))
    history = model.fit(PoissonSampling(50, 10).dataset(IMAGES), epochs=2, verbose=0)
    assert len(history.history["loss"]) == 2


def test_replicas_share_each_batch():
    devices = tf.config.list_logical_devices("CPU")
    strategy = tf.distribute.MirroredStrategy([d.name for d in devices] or None)
    data = CyclicPoissonSampling(50, 10).dataset(NUMBERS)
    for step, (_, _, w) in enumerate(strategy.experimental_distribute_dataset(data)):
        parts = strategy.experimental_local_results(w)
        assert sum(int(provenance.count_marks(part)) for part in parts) == step % 2 + 1


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
