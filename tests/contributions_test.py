# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Per-example products at sizes where other code runs: compiled Gram matrices, picked rows."""

import functools

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf

from dice_tf.engine import gram, layerwise
from dice_tf.engine.contributions import OuterProduct, PerExample, Pooled, Rows
from dice_tf.engine.merging import merged
from dice_tf.engine.residual_rows import heads_and_residuals, residual_rows
from dice_tf.mechanism import DiceMechanism, rounding
from dice_tf.mechanism.clipping import clip_weights


def random_product(batch, positions, k, f, transposed=False):
    """Returns a product and the same inputs and cotangents in float64."""
    random = np.random.default_rng(batch)
    inputs = random.normal(size=(batch, positions, k)).astype("float32")
    cotangents = random.normal(size=(batch, positions, f)).astype("float32")
    given_inputs = inputs.transpose(0, 2, 1) if transposed else inputs
    product = OuterProduct(
        tf.constant(given_inputs), tf.constant(cotangents), shape=(k, f), transposed=transposed
    )
    return product, inputs.astype("float64"), cotangents.astype("float64")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("in_graph", [False, True])
def test_compiled_gram_matrices_of_any_batch(transposed, in_graph):
    positions, k, f = 64, 100, 200
    assert gram.worth_compiling(positions, k, f)
    compute = lambda a, d: gram.squared_norms(a, d, transposed=transposed)
    if in_graph:
        spec = (None, k, positions) if transposed else (None, positions, k)
        compute = tf.function(
            compute, input_signature=[tf.TensorSpec(spec), tf.TensorSpec((None, positions, f))]
        )
    for batch in (0, 1, 13, 17):  # 17 is padded to 18; a replica may have none.
        product, inputs, cotangents = random_product(batch, positions, k, f, transposed)
        expected = (np.einsum("btk,btf->bkf", inputs, cotangents) ** 2).sum((1, 2))
        squares = compute(product.inputs, product.cotangents)
        assert np.all(squares >= expected)
        assert np.all(squares <= expected * (1 + 2 * gram.raised_by(positions, k, f)))


def test_compiled_gram_matrices_never_fall_below_the_truth_where_uses_cancel():
    random = np.random.default_rng(0)
    inputs = 1e3 * random.normal(size=(4, 40, 200))
    cotangents = random.normal(size=(4, 40, 100))
    inputs = np.concatenate([inputs, inputs], 1).astype("float32")
    cotangents = np.concatenate([cotangents, -cotangents * (1 - 3e-7)], 1).astype("float32")
    product = np.einsum("btk,btf->bkf", inputs.astype("float64"), cotangents.astype("float64"))
    assert gram.worth_compiling(80, 200, 100)
    norms = np.sqrt(OuterProduct(inputs, cotangents, shape=(200, 100)).squared_norms())
    assert np.all(norms >= np.linalg.norm(product.reshape(4, -1), axis=1))


def test_a_total_that_rounding_made_negative_counts_as_zero():
    terms = tf.constant([[1.0, -2.0], [np.nan, 1.0], [3.0, 1.0]])
    totals = gram.safe_total(terms).numpy()
    assert 0 <= totals[0] < 1e-5 and np.isnan(totals[1])
    np.testing.assert_allclose(totals[2], 4.0, rtol=1e-6)


def test_a_broken_example_is_not_hidden_by_compiling():
    product, *_ = random_product(3, 64, 128, 512)
    cotangents = product.cotangents.numpy()
    cotangents[1, 7, 9] = np.nan
    squares = gram.squared_norms(product.inputs, tf.constant(cotangents)).numpy()
    assert np.isnan(squares[1]) and np.isfinite(squares[[0, 2]]).all()


WAYS = {
    "eager": lambda function: function,
    "graph": functools.partial(tf.function, autograph=False),
    "xla": functools.partial(tf.function, autograph=False, jit_compile=True),
}


def squared_norms_and_lost(inputs, cotangents):
    """What `dice_tf.engine.gram` states, in float64: squared norms, and what is added to them."""
    inputs, cotangents = inputs.astype("float64"), cotangents.astype("float64")
    of_inputs = inputs @ inputs.swapaxes(1, 2)
    of_cotangents = cotangents @ cotangents.swapaxes(1, 2)
    products = of_inputs * of_cotangents
    v, w = np.linalg.norm(inputs, axis=2), np.linalg.norm(cotangents, axis=2)
    quadratic = lambda matrix, x: np.einsum("bs,bst,bt->b", x, np.abs(matrix), x)

    def gamma(size):  # Blocks of 256, whose sums are added in pairs.
        return rounding.margin(min(size, 256) + (-(-size // 256)).bit_length() + 1)

    of_k, of_f = gamma(inputs.shape[2]), gamma(cotangents.shape[2])
    lost = of_k * quadratic(of_cotangents, v) + of_f * quadratic(of_inputs, w)
    lost += of_k * of_f * (v * w).sum(1) ** 2
    of_sum = rounding.margin(rounding.additions(inputs.shape[1] ** 2) + 1)
    return products.sum((1, 2)), lost + of_sum * np.abs(products).sum((1, 2))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cancelling", [False, True])
def test_norms_of_several_variables_together(way, cancelling):
    random = np.random.default_rng(0)
    factors, squares, lost = [], 0.0, 0.0
    # Of inputs and of cotangents: where positions cancel, rounding depends on each size.
    for positions, k, f in [(16, 900, 2), (16, 2, 300), (16, 5, 5), (4, 30, 20)]:
        inputs = random.normal(size=(3, positions, k)).astype("float32")
        cotangents = random.normal(size=(3, positions, f)).astype("float32")
        if cancelling:
            # Alike in pairs, and all cotangents along one line.
            inputs[:, 1::2] = inputs[:, ::2]
            cotangents[:] = cotangents[:, :1]
            cotangents[:, 1::2] *= -(1 - 3e-7)
        factors.append((tf.constant(inputs), tf.constant(cotangents)))
        exact, added = squared_norms_and_lost(inputs, cotangents)
        squares, lost = squares + exact, lost + added
    together = lambda factors: gram.squared_norms_of([gram.matrices(*pair) for pair in factors])
    found = WAYS[way](together)(factors)
    assert len(found) == 2  # Of 16 positions, and of 4.
    total = np.sum([part.numpy().astype("float64") for part in found], 0)
    assert np.all(total >= squares)
    np.testing.assert_allclose(total, squares + lost, rtol=0.01 if cancelling else 1e-6)
    if cancelling:
        assert np.all(squares < 1e-3 * lost)


def test_a_broken_example_is_broken_by_one_variable():
    random = np.random.default_rng(0)
    pairs = [random.normal(size=(2, 3, 4, 5)).astype("float32") for _ in range(3)]
    pairs[1][1, 2, 0, 0] = np.inf
    (found,) = gram.squared_norms_of([gram.matrices(*map(tf.constant, pair)) for pair in pairs])
    assert np.isfinite(found.numpy()).tolist() == [True, True, False]


@pytest.mark.parametrize(("k", "f"), [(1024, 512), (128, 128)])
def test_both_ways_to_a_norm_give_the_same_sums(k, f):
    product, inputs, cotangents = random_product(4, 64, k, f)
    squares, (part,) = merged([product], 4)
    each = np.einsum("btk,btf->bkf", inputs, cotangents)
    expected = (each**2).sum((1, 2))
    assert np.all(squares >= expected * (1 - 1e-6)) and np.all(squares <= expected * (1 + 2e-4))
    weights = np.arange(1.0, 5.0, dtype="float32")
    (got,) = part.weighted_sums([tf.constant(weights)])
    expected = np.tensordot(weights.astype("float64"), each, 1)
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())


# Among them norms just below C1 + C2: nearly saturated is not saturated.
norms = st.lists(
    st.sampled_from(
        [0.0, 0.3, 0.9, 1.0999, 1.1, 1.4, 1.4999, 2.9, 3.9999, 50.0, 1e30, np.inf, np.nan]
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(norms=norms, error_norm_clip=st.sampled_from([0.1, 0.5, 3.0]), bounded=st.booleans())
def test_rows_complete_a_multiple_of_the_first_sum(norms, error_norm_clip, bounded):
    mechanism = DiceMechanism(
        l2_norm_clip=1.0, error_norm_clip=error_norm_clip, bound_residuals=bounded,
        noise_multiplier=1.0, expected_batch_size=4,
    )  # fmt: skip
    head, residual = clip_weights(tf.constant(norms, tf.float32), mechanism)
    split = residual_rows(head, residual, tf.constant(norms, tf.float32))
    total = split.multiple.numpy() * head.numpy().astype("float64")
    total[split.rows.numpy()] += split.weights.numpy()
    # Weights multiply gradients: what counts is their error times the norm.
    norms = np.where(np.isfinite(norms), norms, 0.0).astype("float32")
    expected = residual.numpy() * norms
    np.testing.assert_allclose(total * norms, expected, atol=1e-6 * expected.max())
    # Never more rows than the residual sum itself needs.
    assert len(split.rows) <= np.count_nonzero(residual)
    if bounded and np.all(norms[norms > 0] > 1 + error_norm_clip):
        assert len(split.rows) == 0


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("layout", [None, ((300, 2, 100), (1, 0, 2))])
def test_a_residual_sum_from_picked_rows(jit_compile, layout):
    product, inputs, cotangents = random_product(6, 3, 300, 200)
    product = OuterProduct(
        product.inputs, product.cotangents, layout=layout,
        shape=(300, 200) if layout is None else (2, 300, 100),
    )  # fmt: skip
    assert product.prefers_rows()
    head = np.array([1.0, 0.5, 0.25, 0.1, 0.05, 1.0], "float32")
    residual = np.array([0.0, 0.5, 0.25, 0.1, 0.05, 0.0], "float32")

    @tf.function(jit_compile=jit_compile)
    def sums(head, residual):
        split = residual_rows(head, residual, tf.ones([6]))
        return heads_and_residuals([product], head, split)[0]

    each = np.einsum("btk,btf->bkf", inputs, cotangents)
    for got, weights in zip(sums(head, residual), (head, residual), strict=True):
        expected = np.tensordot(weights.astype("float64"), each, 1)
        if layout is not None:
            expected = expected.reshape(layout[0]).transpose(layout[1])
        np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("left", [0, 2, 6])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_residual_sums_of_every_kind_share_one_branch(jit_compile, left):
    random = np.random.default_rng(0)
    ids, cotangents = random.integers(0, 50, (6, 4)), random.normal(size=(6, 4, 3))
    table = np.zeros((6, 50, 3))
    for i in range(6):
        np.add.at(table[i], ids[i], cotangents[i])
    product, inputs, other = random_product(6, 3, 300, 200)
    written = random.normal(size=(6, 70, 130))
    rows = Rows(tf.constant(ids, tf.int32), tf.constant(cotangents, tf.float32), shape=(50, 3))
    parts = [rows, product, PerExample(tf.constant(written, tf.float32))]
    assert all(part.prefers_rows() for part in parts)
    each = [table, np.einsum("btk,btf->bkf", inputs, other), written]
    head = random.uniform(0.1, 1, 6).astype("float32")
    residual = head / 2
    residual[:left] *= random.uniform(0.1, 0.9, left)
    if left == 6:
        head[:] = 1.0

    @tf.function(jit_compile=jit_compile)
    def sums(head, residual):
        split = residual_rows(head, residual, tf.ones([6]))
        return heads_and_residuals(parts, head, split), tf.size(split.rows)

    pairs, found = sums(tf.constant(head), tf.constant(residual))
    assert int(found) == min(left, 5)
    for pair, of_part in zip(pairs, each, strict=True):
        for got, weights in zip(pair, (head, residual), strict=True):
            expected = np.tensordot(weights.astype("float64"), of_part, 1)
            np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())


def test_a_subclass_of_a_users_own_is_asked_for_all_sums():
    class Twice(Rows):
        def weighted_sums(self, weights):
            return [2 * total for total in super().weighted_sums(weights)]

        def without(self, broken):
            kept = super().without(broken)
            return Twice(kept.ids, kept.cotangents, shape=kept.shape)

    ids, cotangents = tf.constant([[0, 1], [2, 0], [1, 1]]), tf.ones([3, 2, 4])
    norms = tf.constant([0.7, 2.0, 1.5])
    weights = [tf.constant([1.0, 0.5, 0.6]), tf.constant([0.0, 0.5, 0.4])]
    assert 0 < len(residual_rows(*weights, norms).rows) < 3
    of_kind = []
    for kind in (Rows, Twice):
        parts = {"table": [kind(ids, cotangents, shape=(3, 4))]}
        sums = layerwise._weighted_sums(parts, {"table": 0}, [(norms, weights)])
        of_kind.append([each["table"] for each in sums])
    for once, twice in zip(*of_kind, strict=True):
        np.testing.assert_allclose(twice, 2 * once)


def test_small_variables_taken_together_are_what_they_are_one_by_one():
    random = np.random.default_rng(3)
    shapes = {"a": (), "b": (7,), "c": (3, 5), "d": (1, 1)}
    gradients = {key: random.normal(size=(4, *shape)) for key, shape in shapes.items()}
    parts = {key: PerExample(tf.constant(g, tf.float32)) for key, g in gradients.items()}
    assert all(Pooled.takes([part]) for part in parts.values())
    pool = Pooled(parts)
    flat = {key: g.reshape(4, -1) for key, g in gradients.items()}
    squares = sum((g**2).sum(1) for g in flat.values())
    np.testing.assert_allclose(pool.squared_norms(), squares, rtol=1e-5)
    broken = tf.constant([False, True, False, False])
    weights = np.array([[1.0, 0.5, 0.0, 2.0], [0.0, 0.0, 3.0, 0.25]])
    for kept, of_examples in ((pool, np.ones(4)), (pool.without(broken), [1, 0, 1, 1])):
        sums = kept.weighted_sums(list(tf.constant(weights, tf.float32)))
        for weight, total in zip(weights, sums, strict=True):
            found = kept.by_variable(total)
            for key, shape in shapes.items():
                expected = np.tensordot(weight * of_examples, gradients[key], 1)
                assert found[key].shape == shape
                np.testing.assert_allclose(found[key], expected, rtol=1e-5, atol=1e-6)


def test_only_small_variables_with_one_use_are_taken_together():
    part = lambda *shape: PerExample(tf.zeros([2, *shape]))
    assert Pooled.takes([part(1023)]) and not Pooled.takes([part(1024)])
    assert not Pooled.takes([part(3), part(3)])
    assert not Pooled.takes([random_product(2, 3, 4, 5)[0]])
    assert not Pooled.takes([Pooled({"a": part(3)})])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
