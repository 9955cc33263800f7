# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The mark that proves who drew a batch, what keeps it and what destroys it."""

import numpy as np
import pytest
import tensorflow as tf

from dice_tf.errors import SamplingError
from dice_tf.ledger import claims, provenance, row_counts
from dice_tf.sampling import CyclicPoissonSampling, PoissonSampling, ShuffledEpochs

X = np.arange(60)


def record_of(marks):
    record = provenance.initial_record()
    for count in marks:
        record = provenance.update_record(record, count)
    return record


def record_of_data(data, passes=1):
    return record_of(int(provenance.count_marks(batch[2])) for _ in range(passes) for batch in data)


def check(record, sampling):
    seen = provenance.unpack_record(record)
    claims.check_record(seen, seen["steps"], sampling)


@pytest.mark.parametrize(
    "weights, marks",
    [
        (None, 0),
        ([1.0, 2.0], 0),
        ([1.0, 0.0, 0.0], 0),
        ([1.0, 0.0, -0.0, -0.0], 2),
        ([-1.0, -0.0, -1e-45, -np.inf], 1),
        (np.asarray([-0.0, -0.0], dtype="float64"), 2),
        (np.asarray([-0.0, 1.0], dtype="float16"), 1),
        ({"a": [1.0, -0.0], "b": [1.0, -0.0]}, 1),
        ({"a": [1.0, -0.0, -0.0], "b": [0.0, 1.0, 0.0]}, 1),
        ({"a": [1.0, -0.0, -0.0], "b": [[0.0, 1.0], [0.0, 1.0], [-0.0, 0.0]]}, 1),
        ({"a": [[1.0], [-0.0], [-0.0]], "b": [1.0, 1.0, 0.0]}, 1),
        ([[1.0, 1.0], [-0.0, 1.0], [-0.0, -0.0]], 1),
        ({"a": [1.0, -0.0], "b": None}, 0),
        ([], 0),
    ],
)
def test_marks_are_negative_zeros(weights, marks):
    constant = lambda leaf: tf.constant(leaf, dtype=getattr(leaf, "dtype", tf.float32))
    if isinstance(weights, dict):
        weights = {n: leaf if leaf is None else constant(leaf) for n, leaf in weights.items()}
    elif weights is not None:
        weights = constant(weights)
    count = provenance.count_marks(weights)
    assert count.dtype == tf.int32 and count.shape == () and int(count) == marks


@pytest.mark.parametrize("jit_compile", [False, True])
def test_count_and_update_work_in_compiled_steps(jit_compile):
    variable = tf.Variable(provenance.initial_record())

    @tf.function(jit_compile=jit_compile)
    def step(weights):
        variable.assign(provenance.update_record(variable, provenance.count_marks(weights)))

    for weights in ([1.0, -0.0, 0.0], [-0.0, -0.0, 1.0], [1.0, 0.0, -0.0]):
        step(tf.constant(weights))
    fields = provenance.unpack_record(variable.numpy())
    assert fields["steps"] == 3 and fields["last_group"] == 0 and fields["shortest_cycle"] == 2


def test_record_has_the_declared_form():
    record = provenance.initial_record()
    assert record.dtype == np.int32 and record.shape == (provenance.RECORD_SIZE,)
    assert provenance.update_record(record, 1).dtype == tf.int32
    fields = provenance.unpack_record(record)
    np.testing.assert_array_equal(provenance.pack_record(fields), record)


def brute_force(marks):
    """The record's fields from the whole history at once."""
    groups = [m - 1 for m in marks]
    disordered = sum(g < 0 or (g > 0 and g != last + 1) for last, g in zip([-1, *groups], groups))
    cycles = [last + 1 for last, g in zip(groups, groups[1:]) if g == 0 and last >= 0]
    return {
        "steps": len(marks),
        "last_group": groups[-1],
        "shortest_cycle": min(cycles, default=np.iinfo(np.int32).max),
        "largest_group": max(groups),
        "disordered_steps": disordered,
        "unfinished_steps": 0,
        "assignment": -1,
        "sampling": -1,
        "seeded_steps": 0,
        "mechanism": -1,
        "loop_steps": 0,
        "first_seeded_draw": 0,
    }


def test_record_equals_brute_force_on_random_histories():
    rng = np.random.default_rng(0)
    for _ in range(60):
        marks = rng.integers(0, 4, size=rng.integers(1, 9)).tolist()
        assert provenance.unpack_record(record_of(marks)) == brute_force(marks)


@pytest.mark.parametrize(
    "marks, num_groups",
    [
        ([1], 1),
        ([1, 1, 1], 1),
        ([1, 2, 1, 2, 1], 2),
        ([1, 2, 3, 1, 2, 3, 1], 3),
        ([], 2),
    ],
)
def test_backed_claims_pass(marks, num_groups):
    check(record_of(marks), CyclicPoissonSampling(60, 5, num_groups=num_groups))
    if num_groups == 1:
        check(record_of(marks), PoissonSampling(60, 5))


@pytest.mark.parametrize(
    "marks, num_groups, echoed",
    [
        ([0], 1, ["1 of 1 steps", "ShuffledEpochs"]),
        ([1, 1, 0, 1], 1, ["1 of 4 steps"]),
        ([1, 2, 2, 1], 2, ["1 of 4 steps"]),
        ([2, 1, 2], 2, ["1 of 3 steps"]),
        ([1, 3, 1], 3, ["1 of 3 steps"]),
        ([1, 2, 1, 2], 1, ["at least 2 groups, not 1"]),
        ([1, 2, 3, 1, 2, 3], 2, ["at least 3 groups, not 2"]),
        ([1, 1, 1], 2, ["after 1 steps, not 2"]),
        ([1, 2, 1, 1, 2], 2, ["after 1 steps, not 2", "cut short"]),
        ([1, 2, 3, 1, 2, 1, 2, 3], 3, ["after 2 steps, not 3"]),
    ],
)
def test_case_8_claims_that_steps_do_not_back_are_refused(marks, num_groups, echoed):
    sampling = CyclicPoissonSampling(60, 5, num_groups=num_groups)
    with pytest.raises(SamplingError) as caught:
        check(record_of(marks), sampling)
    for text in [*echoed, repr(sampling)]:
        assert text in str(caught.value)


def test_shuffled_epochs_need_no_mark_and_admit_none():
    check(record_of([0, 0, 0]), ShuffledEpochs(60, 5))
    for marks in ([1, 1], [0, 0, 1]):
        with pytest.raises(SamplingError, match="batches of a Poisson sampler"):
            check(record_of(marks), ShuffledEpochs(60, 5))


@pytest.mark.parametrize("iterations", [0, 1, 5])
@pytest.mark.parametrize("sampling", [CyclicPoissonSampling(60, 5), ShuffledEpochs(60, 5)])
def test_another_number_of_steps_than_recorded_is_refused(iterations, sampling):
    record = record_of([1, 2] if sampling.amplified else [0, 0])
    claims.check_record(provenance.unpack_record(record), 2, sampling)
    match = f"`optimizer.iterations` is {iterations}, but 2 steps were recorded"
    with pytest.raises(SamplingError, match=match):
        claims.check_record(provenance.unpack_record(record), iterations, sampling)


@pytest.mark.parametrize("seeded", [[], [1], [0, 2]])
def test_steps_with_seeded_noise_are_counted(seeded):
    record = provenance.initial_record()
    for step in range(3):
        record = provenance.update_record(record, 1, noise_is_secret=step not in seeded)
    assert provenance.unpack_record(record)["seeded_steps"] == len(seeded)


def test_rows_of_unmarked_batches_are_counted_and_leave_the_process_in_no_record():
    counts = tf.zeros([row_counts.SIZE], tf.int64)
    for marks, rows in ((0, 8), (1, 5), (0, 7), (2, 9)):
        counts = row_counts.update(counts, marks, rows, in_fit=True)
    assert counts.numpy().tolist() == [15, 15, 8]
    assert row_counts.update(counts, 0, 4, in_fit=False).numpy().tolist() == [4, 15, 8]
    assert not any("row" in name for name in provenance.RECORD_FIELDS)


OTHERS = [
    PoissonSampling(60, 5),
    PoissonSampling(61, 5),
    PoissonSampling(60, 6),
    CyclicPoissonSampling(60, 5),
    CyclicPoissonSampling(60, 5, num_groups=3),
    ShuffledEpochs(60, 5),
    ShuffledEpochs(600, 5),
]


def test_samplings_of_equal_cost_have_one_name_and_others_not():
    names = [provenance.sampling_name(sampling) for sampling in OTHERS]
    assert len(set(names)) == len(OTHERS)
    for name, sampling in zip(names, OTHERS, strict=True):
        assert abs(name) < 2**31 and (name < provenance.UNSEEN) == (not sampling.amplified)
    assert provenance.sampling_name(ShuffledEpochs(120, 10)) == provenance.sampling_name(
        ShuffledEpochs(60, 5)
    )
    # Whoever knows the name must not learn the seed.
    assert provenance.sampling_name(PoissonSampling(60, 5, seed=3)) == names[0]


@pytest.mark.parametrize(
    "one, other",
    [
        (PoissonSampling(60, 5), PoissonSampling(600, 5)),
        (ShuffledEpochs(60, 5), ShuffledEpochs(600, 5)),
        (CyclicPoissonSampling(60, 5), CyclicPoissonSampling(600, 5)),
    ],
)
def test_steps_of_another_sampling_are_refused(one, other):
    marks = [0, 0] if not one.amplified else [1, 1] if one.num_groups == 1 else [1, 2]
    join = lambda record, sampling: provenance.pack_record(
        provenance.join_sampling(provenance.unpack_record(record), sampling)
    )
    # What was announced and not drawn does not count.
    record = join(join(provenance.initial_record(), other), one)
    for count in marks:
        record = provenance.update_record(record, count)
    check(record, one)
    check(join(record, one), one)
    mixed = join(record, other)
    for record, sampling in [(record, other), (mixed, one), (mixed, other)]:
        amplified = "a sampling with other parameters"
        message = amplified if sampling.amplified else "epochs of another length"
        with pytest.raises(SamplingError, match=message):
            check(record, sampling)


SAMPLINGS = [
    PoissonSampling(60, 6),
    CyclicPoissonSampling(60, 6),
    CyclicPoissonSampling(60, 6, num_groups=5),
]

KEEPS = {
    "nothing": lambda d: d,
    "map": lambda d: d.map(lambda x, y, w: (x + 1, y, w)),
    "parallel map": lambda d: d.map(lambda x, y, w: (x, y, w), num_parallel_calls=2),
    "prefetch": lambda d: d.prefetch(4),
    "repeat": lambda d: d.repeat(3),
    "positive weights": lambda d: d.map(lambda x, y, w: (x, y, w * tf.cast(x + 1, tf.float32))),
    "cast": lambda d: d.map(lambda x, y, w: (x, y, tf.cast(tf.cast(w, tf.float16), tf.float64))),
    "rows in another order": lambda d: d.map(lambda x, y, w: (x, y, tf.reverse(w, [0]))),
}

DESTROYS = {
    "unbatch and batch": lambda d: d.unbatch().batch(5),
    "rebatch to half": lambda d: d.rebatch(8),
    "rebatch to double": lambda d: d.rebatch(32),
    "drop the weights": lambda d: d.map(lambda x, y, w: (x, y, None)),
    "recompute the weights": lambda d: d.map(lambda x, y, w: (x, y, tf.cast(w > 0, tf.float32))),
    "filter the padding": lambda d: d.unbatch().filter(lambda x, y, w: w > 0).batch(6),
    "cut the padding": lambda d: d.map(lambda x, y, w: (x[w > 0], y[w > 0], w[w > 0])),
}

DESTROYS_ORDER = {
    "shuffle": lambda d: d.repeat(4).shuffle(40, seed=1),
    "skip": lambda d: d.skip(1),
    "take less than a cycle": lambda d: d.take(1).repeat(2),
    "shard": lambda d: d.shard(2, 1),
}


def pairs_and_weights(data):
    # `unbatch` refuses a structure with None.
    return data.map(lambda x, y, w: (x, x, w))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=repr)
@pytest.mark.parametrize("name", KEEPS)
def test_operations_on_whole_batches_keep_the_mark(sampling, name):
    check(record_of_data(KEEPS[name](pairs_and_weights(sampling.dataset(X))), passes=2), sampling)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=repr)
@pytest.mark.parametrize("name", DESTROYS)
def test_operations_on_rows_destroy_the_mark(sampling, name):
    record = record_of_data(DESTROYS[name](pairs_and_weights(sampling.dataset(X))))
    with pytest.raises(SamplingError):
        check(record, sampling)


@pytest.mark.parametrize("sampling", SAMPLINGS[1:], ids=repr)
@pytest.mark.parametrize("name", DESTROYS_ORDER)
def test_batches_out_of_order_are_noticed(sampling, name):
    record = record_of_data(DESTROYS_ORDER[name](pairs_and_weights(sampling.dataset(X))))
    with pytest.raises(SamplingError):
        check(record, sampling)


def test_negative_zero_changes_no_result():
    loss = tf.constant([3.0, -2.0, 5.0])
    for zero in (0.0, -0.0):
        weights = tf.constant([1.0, zero, zero])
        assert float(tf.reduce_sum(loss * weights)) == 3.0
        assert tf.reduce_all(weights[1:] == 0)
        assert float(tf.math.divide_no_nan(1.0, weights[1])) == 0.0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
