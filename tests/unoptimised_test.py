# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The check of the first batch compiles nothing that runs a few times only, and changes no other.

What it compares stays the engine's own code: the same values, from the same formulas.
"""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.eager import context as eager_context

import dice_tf
from dice_tf.checks import rounding
from dice_tf.checks.unoptimised import _with, rewritten_once, unoptimised
from dice_tf.engine import gram

RANDOM = np.random.default_rng(0)


def rewriting(options):
    config = config_pb2.ConfigProto.FromString(options.config_proto_serialized)
    return config.graph_options.rewrite_options


def options():
    return rewriting(eager_context.context().function_call_options)


def rewrites():
    """Whether TensorFlow rewrites new functions of this thread before their first run."""
    return not options().disable_meta_optimizer


def in_another_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_only_this_thread_and_only_inside():
    assert rewrites()
    with unoptimised():
        assert not rewrites()
        assert in_another_thread(rewrites)
        with unoptimised():
            assert not rewrites()
        assert not rewrites()
    assert rewrites()
    with pytest.raises(ValueError), unoptimised():
        raise ValueError
    assert rewrites()


def test_a_step_is_rewritten_once_and_all_else_is_as_the_user_wants_it():
    none, has_gpu = options().NO_MEM_OPT, bool(tf.config.list_physical_devices("GPU"))
    tf.config.optimizer.set_experimental_options({"remapping": False})
    try:
        usual = eager_context.context().function_call_options
        found = rewriting(rewritten_once(usual))
        assert found.memory_optimization == none and found.remapping == found.OFF
        assert found.meta_optimizer_iterations == found.ONE
        assert found.layout_optimizer == (found.DEFAULT if has_gpu else found.OFF)
        assert not found.disable_meta_optimizer
        chosen = _with(usual, layout_optimizer=found.ON, meta_optimizer_iterations=found.TWO)
        found = rewriting(rewritten_once(chosen))
        assert found.layout_optimizer == found.ON
        assert found.meta_optimizer_iterations == found.TWO
    finally:
        tf.config.optimizer.set_experimental_options({"remapping": True})
    assert options().memory_optimization != none


def test_every_step_of_fit_runs_in_one_way(monkeypatch):
    """A step that runs in another way is made ready anew."""
    found = []
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = dice_tf.DiceSGDOptimizer(
        l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=2
    )
    model.compile(optimizer, "mse")
    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    build = model._make_function
    monkeypatch.setattr(
        model,
        "_make_function",
        lambda step: lambda iterator: (found.append(options()), build(step)(iterator))[1],
    )
    for _ in range(2):
        model.fit(x, y, batch_size=2, verbose=0)
    model.train_on_batch(x, y)
    assert len(found) == 9 and all(option == found[0] for option in found)
    assert found[0].memory_optimization == found[0].NO_MEM_OPT


def compiles_norms():
    """Whether norms of a size that is worth it would be compiled by XLA."""
    factors = [tf.constant(RANDOM.normal(size=(3, 64, 160)).astype("float32")) for _ in range(2)]
    graph = tf.function(gram.squared_norms).get_concrete_function(*factors).graph.as_graph_def()
    attributes = [f.attr for f in graph.library.function]
    return any(a["_XlaMustCompile"].b for a in attributes if "_XlaMustCompile" in a)


def test_norms_are_the_same_without_xla():
    factors = [tf.constant(RANDOM.normal(size=(3, 64, 160)).astype("float32")) for _ in range(2)]
    expected = np.linalg.norm(np.matmul(np.swapaxes(factors[0], 1, 2), factors[1]), axis=(1, 2))
    # Where there is no XLA for a processor, nothing is compiled at all.
    usual = gram.worth_compiling(64, 160, 160)
    assert compiles_norms() == usual
    with unoptimised():
        assert not compiles_norms()
        assert in_another_thread(compiles_norms) == usual
        norms = tf.function(gram.squared_norms)(*factors).numpy() ** 0.5
    np.testing.assert_allclose(norms, expected, rtol=2e-3)
    np.testing.assert_allclose(norms, gram.squared_norms(*factors).numpy() ** 0.5, rtol=1e-5)
    assert compiles_norms() == usual


def test_a_few_last_bits_of_fractions_are_changed_and_indices_are_not():
    x = {"a": tf.constant([[0.3, 7.0, -2.6]]), "ids": tf.constant([[4, 5]]), "none": None}
    for size in (2.0**-19, 2.0**-7):
        first, again, other = (
            rounding.perturbed(x, size, seed) for seed in ((1, 2), (1, 2), (1, 3))
        )
        changes = (first["a"] / x["a"] - 1).numpy()[0]
        assert changes[1] == 0 and 0 < np.abs(changes).max() <= 1.01 * size
        np.testing.assert_array_equal(first["a"], again["a"])
        assert (first["a"] != other["a"]).numpy().any()
        np.testing.assert_array_equal(first["ids"], x["ids"])
        assert first["none"] is None
    assert rounding.has_fractions(x)
    assert not rounding.has_fractions({"a": tf.constant([[1.0, 2.0]]), "ids": x["ids"]})


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
