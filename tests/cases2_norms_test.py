# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""D1 and D12: no norm is underestimated, however long the vector and whatever adds it up."""

import functools
import pathlib
import re

from hypothesis import given, settings
from hypothesis import strategies as st
import keras
from keras import layers as L
import numpy as np
import pytest
import tensorflow as tf

import dice_tf
from dice_tf.engine import gram, layerwise, vectorized
from dice_tf.engine.contributions import OuterProduct, PerExample, Rows
from dice_tf.engine.merging import merged
from dice_tf.mechanism import DiceMechanism, rounding
from dice_tf.mechanism.clipping import clip_by_global_norm, clip_weights

C1, C2 = 0.5, 0.25
MECHANISM = DiceMechanism(
    l2_norm_clip=C1, error_norm_clip=C2, noise_multiplier=1.0, expected_batch_size=2
)
WAYS = {
    "eager": lambda function: function,
    "graph": functools.partial(tf.function, autograph=False),
    "xla": functools.partial(tf.function, autograph=False, jit_compile=True),
}
ways = pytest.mark.parametrize("way", WAYS)


def exact_norms(rows):
    rows = rows.reshape(len(rows), -1).astype("float64")
    return np.sqrt(np.einsum("bi,bi->b", rows, rows))


def upper(squares):
    """The norms that weights are made from, in float64."""
    return np.sqrt(np.asarray(squares, "float64")) * rounding.RAISED


def assert_upper_bound(squares, exact, raised=0.0):
    found = upper(squares)
    assert np.all(found >= exact), (found / exact - 1).min()
    assert np.all(found <= exact * (1 + 2e-5 + raised)), (found / exact - 1).max()


@functools.cache
def long_vectors():
    """Ten million entries: random ones, equal ones, and a large one before small ones."""
    random = np.random.default_rng(0).standard_normal(10_000_000, "float32")
    # The square of each of the small ones is less than half a rounding unit of the large one's.
    uneven = np.full(9_999_991, 2.0**-13, "float32")
    uneven[0] = 1.0
    return {"random": random, "equal": np.full(10_000_000, 0.1, "float32"), "uneven": uneven}


@ways
@pytest.mark.parametrize("name", ["random", "equal", "uneven"])
def test_d1_ten_million_entries(name, way):
    vector = long_vectors()[name]
    exact = exact_norms(vector[None])
    row = tf.constant(vector[None])
    written = WAYS[way](lambda t: PerExample(t).squared_norms())
    assert_upper_bound(written(row), exact)
    inputs, one = row[:, None], tf.ones([1, 1, 1])
    product = WAYS[way](lambda a, d: OuterProduct(a, d, shape=(len(vector), 1)).squared_norms())
    assert_upper_bound(product(inputs, one), exact)
    clipped = WAYS[way](lambda t: clip_by_global_norm([t[0, :7], t[0, 7:]], C2))(row)
    (length,) = exact_norms(np.concatenate([part.numpy() for part in clipped])[None])
    assert C2 * (1 - 2e-5) <= length <= C2


def test_d1_no_term_goes_through_many_additions():
    sizes = [*range(1, 3000), 16**7 - 1, 16**7 + 1, 2**31 - 1, 2**31, 9_999_991, 10**9 + 7]
    sizes += np.random.default_rng(0).integers(1, 2**31, 3000).tolist()
    assert max(map(rounding.additions, sizes)) <= rounding.MOST_ADDITIONS
    # Over the variables whose Gram matrices are taken together.
    assert max(map(rounding.additions, range(1, 2**14 + 1))) <= 60
    for size in (1, 16, 17, 37, 256, 1000, 40_009):  # Every term counts once, known size or not.
        for total in (rounding.total, rounding.total_of_signed):
            unknown = tf.function(total, input_signature=[tf.TensorSpec([None, None])])
            for way in (total, unknown):
                assert way(tf.ones([2, size])).numpy().tolist() == [size] * 2


@ways
def test_d1_xla_does_not_undo_the_blocks(way):
    """XLA makes one reduction of two that follow each other; then small terms would be lost."""
    terms = np.full([1, 2**20], 2.0**-25, "float32")
    terms[0, 0] = 1.0
    for total in (rounding.total, rounding.total_of_signed):
        error = float(WAYS[way](total)(tf.constant(terms))[0]) - terms.sum(dtype="float64")
        assert abs(error) <= rounding.margin(rounding.additions(2**20)) * (1 + 2.0**-5)
    if way == "xla":
        compiled = WAYS[way](rounding.total).experimental_get_compiler_ir(tf.constant(terms))
        assert len(re.findall(r" reduce\(", compiled(stage="optimized_hlo"))) >= 5


products = st.tuples(
    st.integers(2, 40),  # positions
    st.integers(1, 80),  # k
    st.integers(1, 80),  # f
    st.sampled_from([1e-12, 1e-3, 1.0, 1e6, 1e12]),
    st.sampled_from(["normal", "positive", "same_cotangents", "orthogonal", "cancelling"]),
    st.booleans(),
    st.integers(0, 2**31),
)


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(products)
def test_d1_gram_matrices_are_never_too_small(case):
    positions, k, f, scale, kind, transposed, seed = case
    check_gram_matrices(positions, k, f, kind, scale, transposed, seed, "eager")


@pytest.mark.parametrize("way", ["graph", "xla"])
@pytest.mark.parametrize("kind", ["normal", "positive", "same_cotangents"])
@pytest.mark.parametrize("sizes", [(2048, 40, 60), (128, 300, 200)], ids=str)
def test_d1_gram_matrices_of_many_positions(sizes, kind, way):
    check_gram_matrices(*sizes, kind, 1.0, False, 0, way)


def check_gram_matrices(positions, k, f, kind, scale, transposed, seed, way):
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(2, positions, k)) * scale
    cotangents = random.normal(size=(2, positions, f))
    if kind == "positive":
        inputs = np.abs(inputs)
    if kind == "same_cotangents":
        cotangents[:] = cotangents[:, :1]
    if kind == "orthogonal":
        inputs = np.broadcast_to(np.eye(positions, k), inputs.shape)
    if kind == "cancelling":
        inputs[:, 1::2] = inputs[:, : 2 * (positions // 2) : 2]
        cotangents[:, 1::2] = -(1 - 3e-7) * cotangents[:, : 2 * (positions // 2) : 2]
    inputs, cotangents = inputs.astype("float32"), cotangents.astype("float32")
    given_inputs = inputs.swapaxes(1, 2).copy() if transposed else inputs
    squares = WAYS[way](functools.partial(gram.squared_norms, transposed=transposed))(
        tf.constant(given_inputs), tf.constant(cotangents)
    )
    each = np.einsum("btk,btf->bkf", inputs.astype("float64"), cotangents.astype("float64"))
    exact = exact_norms(each)
    assert np.all(upper(squares) >= exact)
    parts = exact_norms(inputs.reshape(-1, k)) * exact_norms(cotangents.reshape(-1, f))
    # Where positions cancel, rounding is relative to what cancels.
    without_cancelling = np.maximum(exact, exact_norms(parts.reshape(2, -1)))
    raised = upper(squares) ** 2 - exact**2
    assert np.all(raised <= without_cancelling**2 * 2.1 * (2e-5 + gram.raised_by(positions, k, f)))
    # What docs/privacy.md says.
    stated = {128: 1.5e-4 if kind == "normal" else 1.5e-3, 2048: 4e-3}.get(positions, np.inf)
    assert np.all(upper(squares) <= exact * (1 + stated))


@pytest.mark.parametrize("way", ["graph", "xla"])
@pytest.mark.parametrize("positions, rows", [(2048, 3), (2048, 100_000), (7, 4)])
@pytest.mark.parametrize("size", [1.0, 0.1])
def test_d1_rows_that_are_looked_up_often(positions, rows, size, way):
    random = np.random.default_rng(0)
    ids = random.integers(0, rows, (2, positions)).astype("int32")
    cotangents = (size + (size == 1) * random.normal(size=(2, positions, 5))).astype("float32")
    exact = np.zeros(2)
    for i in range(2):
        table = np.zeros((rows, 5))
        np.add.at(table, ids[i], cotangents[i].astype("float64"))
        exact[i] = np.linalg.norm(table)
    squares = WAYS[way](lambda i, c: Rows(i, c, shape=(rows, 5)).squared_norms())
    # Without repetitions nothing is added.
    assert_upper_bound(squares(ids, tf.constant(cotangents)), exact, 1e-3 if rows < 9 else 0)


@pytest.mark.parametrize("way", ["graph", "xla"])
@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
def test_d1_a_table_that_is_also_a_kernel(sign, way):
    """Three uses of one variable: rows that are looked up, and products with the whole table."""
    random = np.random.default_rng(0)
    rows, dim, positions = 30, 8, 200
    ids = random.integers(0, rows, (2, positions)).astype("int32")
    of_rows = random.normal(size=(2, positions, dim)).astype("float32")
    inputs = random.normal(size=(2, positions, rows)).astype("float32")
    cotangents = random.normal(size=(2, positions, dim)).astype("float32")
    if sign:  # The product repeats the rows, or takes them back.
        inputs, cotangents = np.eye(rows, dtype="float32")[ids], np.float32(sign) * of_rows

    @WAYS[way]
    def squares(ids, of_rows, inputs, cotangents):
        looked_up = Rows(ids, of_rows, shape=(rows, dim))
        return merged([looked_up, OuterProduct(inputs, cotangents, shape=(rows, dim))], 2)[0]

    exact = np.einsum("btk,btf->bkf", inputs.astype("float64"), cotangents.astype("float64"))
    for i in range(2):
        np.add.at(exact[i], ids[i], of_rows[i].astype("float64"))
    found = upper(squares(ids, of_rows, inputs, cotangents))
    assert np.all(found >= exact_norms(exact))
    # What cancels is some 40 long, for each of the uses.
    assert np.all(found <= exact_norms(exact) * 1.001 + (1.0 if sign < 0 else 0))


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.floats(2**-20, 2**20, width=32), min_size=1, max_size=8),
    st.sampled_from([1e-11, 0.1, 0.7, 3.0]),
    st.sampled_from([0.3, 1.0]),
)
def test_d1_weights_allow_for_what_norms_have_lost(norms, c1, ratio):
    """Float32 norms may be too small by 85 rounding units, and weights too large by six."""
    mechanism = DiceMechanism(
        l2_norm_clip=c1, error_norm_clip=c1 * ratio, noise_multiplier=1.0, expected_batch_size=1
    )
    automatic = DiceMechanism(clipping="automatic", noise_multiplier=1.0, expected_batch_size=1)
    true = np.array(norms) * (1 + 100 * rounding.UNIT)
    for one in (mechanism, automatic):
        head, residual = (np.asarray(w, "float64") for w in clip_weights(tf.constant(norms), one))
        assert np.all(head * true <= one.l2_norm_clip)
        assert np.all(np.abs(residual) * true <= one.error_norm_clip)


MODELS = {
    "a_million_inputs": ((1_000_000,), lambda: [L.Dense(1, use_bias=False)]),
    "image": ((224, 224, 3), lambda: [L.Flatten(), L.Dense(2, use_bias=False)]),
    "a_million_written_down": (
        (8, 1000), lambda: [L.Dense(1000, use_bias=False), L.GlobalAveragePooling1D()]),
    "many_positions": (
        (2048, 8), lambda: [L.Dense(8, use_bias=False), L.GlobalAveragePooling1D()]),
    "bfloat16": ((200_000,), lambda: [L.Dense(2, dtype="mixed_bfloat16")]),
    "convolution": ((64, 64, 3), lambda: [L.Conv2D(8, 3), L.GlobalAveragePooling2D()]),
}  # fmt: skip


def make_model(name):
    keras.utils.set_random_seed(0)
    shape, layers = MODELS[name]
    model = keras.Sequential([keras.Input(shape), *layers()])
    model.compile(loss="mae")
    outputs = model.output_shape[-1]
    model._compile_loss.build(tf.zeros([2, outputs]), tf.zeros([2, outputs]))
    x = np.random.default_rng(0).normal(size=(2, *shape)).astype("float32")
    return model, tf.constant(x), tf.fill([2, outputs], 1e3)


OLD_TENSORFLOW = tf.__version__.startswith("2.16.")


# Of the second engine there is only one path, a row of all gradients.
@pytest.mark.parametrize("way", ["graph", "xla"])
@pytest.mark.parametrize(
    "name, engine",
    [(name, layerwise) for name in MODELS]
    + [(name, vectorized) for name in ("a_million_inputs", "bfloat16", "convolution")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_d1_the_part_of_one_example_in_the_sums(name, way, engine):
    model, x, y = make_model(name)
    weights = lambda norms: clip_weights(norms, MECHANISM)
    sums = WAYS[way](lambda *batch: engine.weighted_gradient_sums(model, *batch, weights))
    if (name, engine, way) == ("bfloat16", vectorized, "xla") and OLD_TENSORFLOW:
        # Its XLA makes no program of that on a CPU, and says so.
        with pytest.raises(tf.errors.InternalError, match="Invalid LLVM IR"):
            sums(x, y, tf.constant([1e4, 0.0]))
        return
    found = sums(x, y, tf.constant([1e4, 0.0]))
    lengths = {}
    for part, threshold in (("head", C1), ("residual", C2)):
        flat = np.concatenate([t.numpy().ravel() for t in getattr(found, part)])
        (lengths[part],) = exact_norms(flat[None])
        assert threshold * (1 - 2e-3) <= lengths[part] <= threshold
    assert sum(lengths.values()) <= C1 + C2


@pytest.mark.parametrize("clipping", ["flat", "automatic"])
def test_d1_one_private_step_with_xla(clipping):
    keras.utils.set_random_seed(0)
    arguments = dict(clipping=clipping) if clipping == "automatic" else dict(
        l2_norm_clip=C1, error_norm_clip=C2)  # fmt: skip
    dense = L.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1_000_000,)), dense])
    with pytest.warns(UserWarning, match="noise_multiplier=0"):
        optimizer = dice_tf.DiceSGDOptimizer(
            1.0, noise_multiplier=0.0, expected_batch_size=2, self_check=False, **arguments
        )
    model.compile(optimizer, "mse", jit_compile=True)
    x = np.random.default_rng(0).normal(size=(2, 1_000_000)).astype("float32")
    model.train_on_batch(x, np.full((2, 1), 100.0), sample_weight=np.array([1.0, 0.0]))
    # Weights were 0, so they are the step: half of what the only example adds.
    head, residual = (
        exact_norms(2 * np.asarray(v)[None])[0] for v in (dense.kernel, optimizer.errors[0])
    )
    mechanism = optimizer.mechanism
    assert mechanism.l2_norm_clip * (1 - 1e-4) <= head <= mechanism.l2_norm_clip
    assert 0.9 * mechanism.error_norm_clip <= residual <= mechanism.error_norm_clip


def test_d12_the_page_states_the_bound_of_the_code():
    page = (pathlib.Path(__file__).absolute().parents[1] / "docs" / "privacy.md").read_text()
    (rounding_text,) = re.findall(r"\* \*\*Rounding\.\*\*.*?\n\* ", page, re.DOTALL)
    stated = [float(number) for number in re.findall(r"\d(?:\.\d+)?e-\d+", rounding_text)]
    assert stated[0] == rounding.MARGIN
    # The derivation: rounding units of a squared norm, of a weight, and both together.
    units = (rounding.MOST_ADDITIONS + 15 + 2 + 3 + 14) / 2 + 2 + 6 + 10
    assert units * rounding.UNIT <= stated[1] <= rounding.MARGIN
    # What remains: how far the rounding of a sum over many examples moves with one of them.
    size, random = 4096, np.random.default_rng(0)
    gradients = random.normal(size=[1, 9000]) + 0.3 * random.normal(size=[size, 9000])
    gradients = gradients.astype("float32")
    weights = (C1 / exact_norms(gradients)).astype("float32")
    sums = [
        PerExample(gradients).weighted_sums([tf.constant(w)])[0].numpy().astype("float64")
        for w in (weights, weights * (np.arange(size) > 0))
    ]
    moved, (norm,) = sums[0] - sums[1], exact_norms((sums[0] - sums[1])[None])
    assert "4,096" in rounding_text
    assert np.linalg.norm(moved - weights[0] * gradients[0].astype("float64")) < stated[-2] * C1
    assert abs(norm / C1 - 1) < stated[-1]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
