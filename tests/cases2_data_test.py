# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Data as people have it: on disk, sparse, ragged, in tables, in lists that do not fit together."""

import pathlib
import re

import keras
import numpy as np
import pytest
from scipy import sparse
import tensorflow as tf

import dice_tf
from dice_tf.errors import DicePrivacyError, SamplingError
from dice_tf.sampling import PoissonSampling, ShuffledEpochs, data_sources
from dice_tf.training import dense

ROOT = pathlib.Path(__file__).absolute().parents[1]
N, B, DELTA = 60, 8, 1e-3
RNG = np.random.default_rng(0)
X = np.maximum(RNG.normal(size=(N, 3)), 0).astype("float32")
Y = RNG.normal(size=(N, 1)).astype("float32")
NUMBERS = np.arange(N)
# Values that no message may print.
SECRET = 4711.25


def make_model(noise_multiplier=2.0, **compile_arguments):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = dice_tf.DiceSGDOptimizer(
        0.1,
        l2_norm_clip=1.0,
        noise_multiplier=noise_multiplier,
        expected_batch_size=B,
        noise_seed=1,
    )
    model.compile(optimizer, "mse", **compile_arguments)
    return model


def refused(call, *words):
    """Returns the message of a typed refusal that has these words, few others, and no row."""
    with pytest.raises(DicePrivacyError) as caught:
        call()
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    assert "4711" not in message and len(message.split()) <= 60, message
    return message


IMAGES = np.stack([np.full((2, 3), i, dtype="float32") for i in range(N)])


# B5: sparse data is made dense, ragged data refused, and no message prints a row.

COO = sparse.coo_array(X)
SPARSE = {
    "SparseTensor": tf.sparse.from_dense(X),
    "csr": sparse.csr_matrix(X),
    "csr, float64": sparse.csr_array(X.astype("float64")),
    "coo": COO,
    # SciPy does not promise an order of entries.
    "unordered": sparse.coo_array((COO.data[::-1], (COO.row[::-1], COO.col[::-1])), COO.shape),
    "lil": sparse.lil_matrix(X),
}
TRAIN = {
    "fit": lambda m, x, y: m.fit(x, y, batch_size=B, shuffle=False, verbose=0),
    "train_on_batch": lambda m, x, y: m.train_on_batch(x, y),
    "private_train_step": lambda m, x, y: dice_tf.private_train_step(m, (x, y)),
    "sampler": lambda m, x, y: m.fit(PoissonSampling(N, B, seed=3).dataset(x, y), verbose=0),
}


def weights_after(way, x, y):
    model = make_model()
    TRAIN[way](model, x, y)
    return np.concatenate([w.ravel() for w in model.get_weights()])


@pytest.fixture(scope="module")
def dense_weights():
    return {way: weights_after(way, X, Y) for way in TRAIN}


@pytest.mark.parametrize("way", TRAIN)
@pytest.mark.parametrize("kind", ["SparseTensor", "csr, float64"])
def test_b5_sparse_rows_train_as_dense_ones_do(kind, way, dense_weights):
    y = tf.sparse.from_dense(Y) if kind == "SparseTensor" else sparse.csr_matrix(Y)
    found = weights_after(way, SPARSE[kind], y)
    np.testing.assert_allclose(found, dense_weights[way], rtol=1e-5)


@pytest.mark.parametrize("kind", SPARSE)
def test_b5_sparse_rows_of_every_format_are_the_dense_ones(kind):
    fetch = data_sources.row_fetcher({"a": SPARSE[kind]}, SPARSE[kind], N)
    x, y = fetch(tf.constant([59, 0, 7, 0], tf.int64))
    for rows in (x["a"], y):
        np.testing.assert_array_equal(rows.numpy(), X[[59, 0, 7, 0]])
    np.testing.assert_array_equal(dense.to_dense("x", SPARSE[kind]).numpy(), X)


def test_b5_sparse_data_sets_are_trained_on_and_accounted():
    rows = tf.data.Dataset.from_tensor_slices((SPARSE["SparseTensor"], Y)).batch(B)
    sampling = ShuffledEpochs(N, B)
    budget = dice_tf.EpsilonCallback(sampling, DELTA)
    model = make_model(jit_compile=False)
    model.fit(rows, verbose=0, callbacks=[budget])
    assert budget.accounted_steps() == 8
    # A `map` may make rows sparse again, behind a sampler too.
    sampling = PoissonSampling(N, B)
    data = sampling.dataset(X, Y).map(lambda x, y, w: (tf.sparse.from_dense(x), y, w))
    make_model().fit(data, verbose=0, callbacks=[dice_tf.EpsilonCallback(sampling, DELTA)])


def test_b5_sparse_tensors_of_any_rank_are_read_by_row():
    for array in (X[:, 0], X, IMAGES, IMAGES > 30):
        fetch = data_sources.row_fetcher(tf.sparse.from_dense(array), None, N)
        rows, _ = fetch(tf.constant([40, 1, 40], tf.int64))
        np.testing.assert_array_equal(rows.numpy(), array[[40, 1, 40]])
    words = tf.sparse.SparseTensor([[0, 0]], ["word"], [N, 3])
    refused(lambda: PoissonSampling(N, B).dataset(words), "`x`", "sparse", "__getitem__")


RAGGED = tf.RaggedTensor.from_row_lengths(np.full(2 * N, SECRET, "float32"), [1, 3] * (N // 2))
EVEN = tf.RaggedTensor.from_row_lengths(np.full(3 * N, SECRET, "float32"), [3] * N)


@pytest.mark.parametrize("ragged", [RAGGED, EVEN], ids=["uneven", "even"])
@pytest.mark.parametrize("place", ["x", "y"])
def test_b5_ragged_rows_are_refused_everywhere_without_printing_them(ragged, place):
    data = (ragged, Y) if place == "x" else (X, ragged)
    words = ["Ragged rows", "to_tensor", "mask_zero", "`x`"]
    seen = [*words[:3], f"`{place}`"]
    batches = tf.data.Dataset.from_tensor_slices(data).batch(B)
    refused(lambda: make_model().fit(*data, verbose=0), *seen)
    refused(lambda: make_model().fit(batches, verbose=0), *words)
    refused(lambda: make_model().fit(PoissonSampling(N, B).dataset(*data), verbose=0), *words)
    refused(lambda: make_model().fit((b for b in batches), verbose=0), *words[:3])
    refused(lambda: make_model().train_on_batch(*data), *seen)
    refused(lambda: make_model(run_eagerly=True).train_on_batch(*data), *seen)
    refused(lambda: dice_tf.private_train_step(make_model(), data), *seen)
    refused(lambda: dice_tf.check_gradients(make_model(), data), *seen)
    step = tf.function(lambda batch: dice_tf.private_train_step(make_model(), batch))
    refused(lambda: step(data), *seen)
    # The remedy.
    x, y = (part.to_tensor() if part is ragged else part for part in data)
    make_model().train_on_batch(x, y[:, :1])


# B11: `validation_split`.


@pytest.mark.parametrize("split", [0.2, 0.5])
def test_b11_a_split_that_contradicts_the_sampling_is_named(split):
    sampling, left = ShuffledEpochs(N, B), int(N * (1 - split))
    call = lambda sampling: make_model().fit(
        X, Y, batch_size=B, validation_split=split, verbose=0,
        callbacks=[dice_tf.EpsilonCallback(sampling, DELTA)],
    )  # fmt: skip
    refused(lambda: call(sampling), f"validation_split={split}", f"{left} rows", "num_examples=n")
    # Declared as it is, the split is right.
    call(ShuffledEpochs(left, B))


def test_b11_a_sampler_says_how_to_hold_rows_out():
    data = PoissonSampling(N, B).dataset(X, Y)
    message = refused(
        lambda: make_model().fit(data, validation_split=0.2, verbose=0), "`validation_split`"
    )
    x, y, n = X, Y, 48
    names = dict(x=x, y=y, n=n)
    for code in ("x_val, y_val = x[n:], y[n:]", "x, y = x[:n], y[:n]"):
        assert f"`{code}`" in message
        exec(code, names)
    held_out = names["x_val"], names["y_val"]
    history = make_model().fit(
        PoissonSampling(n, B).dataset(names["x"], names["y"]), validation_data=held_out, verbose=0
    )
    assert len(held_out[0]) == N - n and "val_loss" in history.history
    # Keras ignores the split next to validation data, and so does this.
    make_model().fit(data, validation_split=0.2, validation_data=held_out, verbose=0)


def test_b11_the_ten_minute_program_validates_on_rows_outside_n():
    page = (ROOT / "docs" / "user_guide.md").read_text(encoding="utf-8")
    program = page.split("## Your own model in ten minutes")[1].split("\n## ")[0]
    data, *_ = blocks = re.findall(r"```python\n(.*?)```", program, re.DOTALL)
    names = {}
    exec(data, names)  # Our own page.
    assert len(names["x"]) == len(names["y"]) == 20_000 and len(names["x_val"]) == 2000
    assert not np.shares_memory(names["x"], names["x_val"])
    assert "num_examples=20_000" in program
    (training,) = [block for block in blocks if "model.fit(" in block]
    assert "validation_data=(x_val, y_val)" in training and "val_accuracy" in training


# B14: lists, tables and streams.


def ones(*lengths):
    return [np.full(length, SECRET, "float32") for length in lengths]


BAD_LISTS = {
    "late row": ([(x, 1) for x in ones(*[2] * 59, 3)], ["one shape", "(2,), (3,)", "Pad"]),
    "label": ([(1.0, y) for y in ones(*[1] * 59, 2)], ["one shape", "(1,), (2,)"]),
    "in a dictionary": ([({"a": x}, 1) for x in ones(*[2] * 59, 1)], ["one shape"]),
    "lists": ([([SECRET] * (1 + (i == 59)), 1) for i in range(N)], ["one shape", "(1,), (2,)"]),
    "lists in lists": ([([[1], [SECRET] * (i % 2 + 1)], 1) for i in range(N)], ["one shape"]),
    "parts": ([(SECRET, 1)] * 59 + [(SECRET, 1, 1)], ["one structure", "tuple of 2", "tuple of 3"]),
    "keys": ([{"a": SECRET}] * 59 + [{"b": SECRET}], ["one structure", "['a']", "['b']"]),
    "kinds": ([(SECRET, 1)] * 59 + [SECRET], ["one structure", "an array", "tuple of 2"]),
    "types": ([(SECRET, 1)] * 59 + [("4711", 1)], ["strings and numbers", "float64", "object"]),
    "gaps": ([("4711", 1)] * 59 + [(None, 1)], ["(None)", "Fill gaps"]),
}


@pytest.mark.parametrize("name", BAD_LISTS)
def test_b14_lists_that_do_not_fit_together_are_refused_at_once(name):
    rows, words = BAD_LISTS[name]
    assert len(rows) == N
    refused(lambda: PoissonSampling(N, B).dataset(rows), *words)


def test_b14_lists_keep_all_that_is_in_them():
    # The first element alone does not tell the type: 0.5 was cut to 0.
    halves = [[0, 1]] + [[i, i + 0.5] for i in range(1, N)]
    batch, _ = data_sources.row_fetcher(halves, NUMBERS, N)(tf.constant([1, 0], tf.int64))
    assert batch.dtype == tf.float32 and batch.numpy().tolist() == [[1.0, 1.5], [0.0, 1.0]]
    # Bytes that end with zeros, such as those of encoded images, lost them.
    encoded = [b"\x00%d\x00\x00" % i for i in range(N)]
    for x, y in ((encoded, NUMBERS), (NUMBERS, encoded), (list(zip(encoded, NUMBERS)), None)):
        batch = data_sources.row_fetcher(x, y, N)(tf.constant([7], tf.int64))
        assert b"\x007\x00\x00" in [leaf.numpy()[0] for leaf in batch]


class Source:
    """A source whose elements cannot be looked at beforehand."""

    def __init__(self, element, size=N):
        self.element, self.size = element, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.element(index)


def test_b14_a_source_whose_types_change_is_refused_by_the_batch():
    for element in (lambda i: (i / 2 if i else 0, 1), lambda i: (str(i) if i else 0, 1)):
        data = PoissonSampling(N, 30).dataset(Source(element))
        with pytest.raises(tf.errors.OpError, match="one type each|mix strings and numbers"):
            list(data)
    # `fit` raises what was meant, not TensorFlow's account of it.
    source = Source(lambda i: (X[i] if i else [0, 0, 0], Y[i]))
    with pytest.raises(SamplingError, match="^Elements of the source must have one type each"):
        make_model().fit(PoissonSampling(N, B).dataset(source), verbose=0)
    # Numbers that the first type holds are fine.
    x, _ = data_sources.row_fetcher(Source(lambda i: (i or 0.5, i)), None, N)(
        tf.constant([3, 0], tf.int64)
    )
    assert x.numpy().tolist() == [3.0, 0.5]


def test_b14_tables_of_several_types_go_in_as_columns():
    import pandas

    table = pandas.DataFrame(
        {"age": NUMBERS / 2, "city": ["Bonn", "Rome"] * 30, "old": NUMBERS > 9}
    )
    sampling = PoissonSampling(N, B)
    message = refused(
        lambda: sampling.dataset(table, NUMBERS), "`x`", "several types", "str", "map"
    )
    remedy = "{name: x[name].to_numpy() for name in x}"
    assert remedy in message
    columns = eval(remedy, {"x": table})
    x, y, _ = next(iter(sampling.dataset(columns, table["age"])))
    np.testing.assert_array_equal(x["age"].numpy(), y.numpy())
    assert x["city"].dtype == tf.string and x["old"].dtype == tf.bool
    # Columns of one type are an array, whatever the labels of the rows.
    numbers = table[["age"]].sample(frac=1, random_state=0)
    x, y, _ = next(iter(sampling.dataset(numbers, numbers["age"])))
    np.testing.assert_array_equal(x.numpy()[:, 0], y.numpy())
    mixed = table[["age", "old"]]
    assert '`x.astype("float32")`' in refused(lambda: sampling.dataset(mixed), "bool, float")
    assert sampling.dataset(mixed.astype("float32")).element_spec[0].shape == (None, 2)
    gaps = table["city"].astype(object).where(table["old"], None)
    refused(lambda: sampling.dataset(gaps), "NoneType, str", "Fill gaps")


def test_b14_dates_and_records_are_refused_with_what_to_do():
    sampling = PoissonSampling(N, B)
    dates = np.asarray(["2026-01-01"] * N, "datetime64[D]")
    refused(lambda: sampling.dataset({"day": dates}), "`x['day']`", "datetime64[D]", "into numbers")
    x = np.zeros(N, [("a", "float32"), ("b", "int64")])
    message = refused(lambda: sampling.dataset(x), "records", "dict of columns")
    remedy = "{name: x[name] for name in x.dtype.names}"
    assert remedy in message
    assert set(sampling.dataset(eval(remedy, {"x": x})).element_spec[0]) == {"a", "b"}
    refused(lambda: sampling.dataset(Source(lambda i: dates[i])), "`x`", "datetime64[D]")


STREAMS = {
    "generator": lambda: ((x, y) for x, y in zip(X, Y)),
    "zip": lambda: zip(X, Y),
    "tf.data.Dataset": lambda: tf.data.Dataset.from_tensor_slices((X, Y)),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_b14_streams_are_refused_with_a_remedy(kind):
    sampling = PoissonSampling(N, B)
    refused(lambda: sampling.dataset(STREAMS[kind]()), "`x`", "list(...)", "__getitem__", kind)
    refused(lambda: sampling.dataset(X, STREAMS[kind]()), "`y`", "list(...)", kind)
    x, y, _ = next(iter(sampling.dataset(list(STREAMS[kind]()))))
    assert x.shape[1:] == (3,) and y.shape[1:] == (1,)


def test_b14_sets_lengthless_sources_and_batches_are_refused():
    class Endless:
        def __getitem__(self, index):
            return X[index], Y[index]

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return N

        def __getitem__(self, index):
            return X[:B], Y[:B]

    sampling = PoissonSampling(N, B)
    for x, name in ((set(range(N)), "set"), (Endless(), "Endless")):
        refused(lambda: sampling.dataset(x), "`x`", "`__len__`", name)
    refused(lambda: sampling.dataset(Batches()), "`x`", "batches, not examples", "Batches")


def test_b14_a_table_that_gives_rows_is_a_source():
    # As a data set of Hugging Face: it has a shape, and rows that are dictionaries.
    class Rows(Source):
        shape = (N, 2)

        def __getitems__(self, indices):
            return [self.element(i) for i in indices]

    data = PoissonSampling(N, B).dataset(Rows(lambda i: {"text": f"{i}", "label": i}))
    x, y, _ = next(iter(data))
    assert y is None and x["text"].numpy()[0] == b"%d" % x["label"].numpy()[0]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
