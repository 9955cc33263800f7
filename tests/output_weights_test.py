# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Models of several outputs, of which some have sample weights and others none, that is 1."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dice_tf.engine.units import present_rows
from dice_tf.errors import LossError, SamplingError
from dice_tf.sampling import PoissonSampling
from dice_tf.training.epsilon_callback import EpsilonCallback
from dice_tf.training.optimizers import DiceSGDOptimizer

N, B = 50, 10
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(N, 3)).astype("float32")
A = RANDOM.normal(size=(N, 2)).astype("float32")
LABELS = RANDOM.integers(0, 2, (N, 1)).astype("float32")
WEIGHTS = RANDOM.uniform(size=N).astype("float32")
ONES = np.ones(N, "float32")
NAMED = {"a": A, "b": LABELS}


def make(named=True, **arguments):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    outputs = {
        "a": keras.layers.Dense(2, name="a")(inputs),
        "b": keras.layers.Dense(1, activation="sigmoid", name="b")(inputs),
    }
    losses = {"a": "mse", "b": "binary_crossentropy"}
    model = keras.Model(inputs, outputs if named else list(outputs.values()))
    optimizer = DiceSGDOptimizer(
        0.5, l2_norm_clip=0.5, noise_multiplier=1.0, expected_batch_size=B, noise_seed=0,
        **arguments,
    )  # fmt: skip
    model.compile(optimizer, losses if named else list(losses.values()), metrics=[["mae"], []])
    return model


def trained(x, y, sample_weight, named, **arguments):
    model = make(named, **arguments)
    model.fit(x, y, sample_weight=sample_weight, batch_size=B, shuffle=False, verbose=0)
    return [variable.numpy() for variable in model.trainable_variables]


@pytest.mark.parametrize(
    "arguments, first",
    [
        pytest.param({}, WEIGHTS, id="whole"),
        pytest.param({}, None, id="whole, second weighted"),
        pytest.param({"chunk_size": 4}, WEIGHTS, id="chunks"),
        pytest.param({"gradient_engine": "vectorized"}, None, id="vectorized, second weighted"),
        pytest.param({"num_microbatches": 5}, WEIGHTS, id="microbatches"),
    ],
)
def test_an_output_without_weights_has_weight_1(arguments, first):
    second = None if first is WEIGHTS else WEIGHTS
    expected = trained(
        X, [A, LABELS], [ONES if w is None else w for w in (first, second)], False, **arguments
    )
    unweighted = trained(X, [A, LABELS], None, False, **arguments)
    assert any(np.any(e != u) for e, u in zip(expected, unweighted))
    for found in (
        trained(X, [A, LABELS], [first, second], False, **arguments),
        trained(X, NAMED, {"a": first, "b": second}, True, **arguments),
    ):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "weights, ones",
    [
        ([WEIGHTS, None], (WEIGHTS, ONES)),
        ([None, WEIGHTS], (ONES, WEIGHTS)),
        ((None, None), (ONES, ONES)),
        ({"a": None, "b": WEIGHTS}, {"a": ONES, "b": WEIGHTS}),
    ],
    ids=["list", "list, second", "tuple, none", "named"],
)
def test_so_it_has_in_the_batches_of_a_sampler(weights, ones):
    y = NAMED if isinstance(weights, dict) else (A, LABELS)
    batches = [
        PoissonSampling(N, B, seed=1).dataset(X, y, given).as_numpy_iterator()
        for given in (weights, ones)
    ]
    for (_, _, found), (_, _, expected) in zip(*batches, strict=True):
        keras.tree.map_structure(np.testing.assert_array_equal, found, expected)
        # As bits, because negative zeros equal zeros.
        bits = lambda w: w.view(np.int32)
        keras.tree.map_structure(np.testing.assert_array_equal, *(
            keras.tree.map_structure(bits, part) for part in (found, expected)
        ))  # fmt: skip


@pytest.mark.parametrize("sampled", [True, False])
def test_an_output_that_is_left_out_is_refused(sampled):
    if sampled:
        data = PoissonSampling(N, B).dataset(X, NAMED, {"a": WEIGHTS})
    else:
        data = tf.data.Dataset.from_tensor_slices((X, NAMED, {"a": WEIGHTS})).batch(B)
    with pytest.raises(LossError, match=r"sample_weight.*entry.*KeyError: 'b'.*None.*weight 1"):
        make().fit(data, verbose=0)


@pytest.mark.parametrize(
    "named, y, weights, received",
    [
        (True, NAMED, {"b": WEIGHTS}, r"a dict with entries \['b'\], which gives KeyError: 'a'"),
        (False, (A, LABELS), {"a": WEIGHTS, "b": WEIGHTS}, "a dict with entries"),
        (False, (A, LABELS), (WEIGHTS,), "a tuple of 1 entries, which gives IndexError"),
    ],
)
@pytest.mark.parametrize("trained_before", [True, False])
def test_weights_of_another_structure_are_refused(named, y, weights, received, trained_before):
    model, sampling = make(named), PoissonSampling(N, B)
    if trained_before:
        model.fit(sampling.dataset(X, y), verbose=0)
    with pytest.raises(LossError, match=received):
        model.fit(sampling.dataset(X, y, weights), verbose=0)


def test_an_output_without_a_loss_needs_no_weights():
    with_metrics, sampling = make(), PoissonSampling(N, B)
    outputs = {name: with_metrics.get_layer(name).output for name in "ab"}
    model = keras.Model(with_metrics.input, outputs)
    model.compile(with_metrics.optimizer, {"a": "mse", "b": None})
    model.fit(sampling.dataset(X, NAMED, {"a": WEIGHTS}), verbose=0)
    assert int(model.optimizer.iterations) == 5


@pytest.mark.parametrize("weight_of_b", ["ones", "none", "same"])
def test_amplification_is_refused_if_an_output_trains_on_padding(weight_of_b):
    sampling = PoissonSampling(N, B)
    others = {"ones": tf.ones_like, "none": lambda w: None, "same": lambda w: w}
    data = sampling.dataset(X, NAMED).map(
        lambda x, y, w: (x, y, {"a": w, "b": others[weight_of_b](w)})
    )
    model = make()
    model.fit(data, verbose=0)
    epsilon = EpsilonCallback(sampling, delta=1e-3)
    epsilon.set_model(model)
    if weight_of_b == "same":
        assert 0 < epsilon.epsilon() < 100
    else:
        with pytest.raises(SamplingError, match="batches that it did not draw"):
            epsilon.epsilon()


def test_an_example_is_present_if_an_output_trains_on_it():
    zeros = tf.zeros(3)
    np.testing.assert_array_equal(present_rows((zeros, None), 3), [1, 1, 1])
    second = tf.constant([0.0, 2.0, 0.0])
    np.testing.assert_array_equal(present_rows((zeros, second), 3), [0, 1, 0])
    np.testing.assert_array_equal(present_rows((zeros, zeros), 3), [0, 0, 0])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
