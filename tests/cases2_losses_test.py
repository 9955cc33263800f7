# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights, masks and batch axes: gradients of single examples where people put them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dice_tf
from dice_tf.engine import layerwise, vectorized
from dice_tf.engine.loss import call_in_training, per_example_losses
from dice_tf.errors import GradientEngineError, LossError, SamplingError
from dice_tf.training import class_weights

LAYERS = keras.layers
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(8, 6)).astype("float32")
FRAMES = RANDOM.normal(size=(8, 5, 4)).astype("float32")
Y = np.arange(8) % 3
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(model, loss=CROSS_ENTROPY, **arguments):
    arguments = {"expected_batch_size": 8, **arguments}
    optimizer = dice_tf.DiceSGDOptimizer(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, **arguments)
    model.compile(optimizer, loss)
    return model


def fit(model, x, y, **arguments):
    model.fit(x, y, batch_size=8, verbose=0, **arguments)


def norms(model, x, y, engine=layerwise):
    """Norms from an engine, compiled, as `fit` calls it."""
    clip = lambda norms: (tf.ones_like(norms), None)

    @tf.function(autograph=False)
    def run(x, y):
        return engine.weighted_gradient_sums(model, x, y, None, clip).norms

    model._symbolic_build(data_batch=(x, y))
    return run(tf.constant(x), tf.constant(y))


def norms_in_a_loop(model, x, y):
    """Norms from one plain gradient per example."""
    found = []
    for i in range(len(x)):
        with tf.GradientTape() as tape:
            y_pred = call_in_training(model, tf.constant(x[i : i + 1]))
            loss = per_example_losses(model, None, tf.constant(y[i : i + 1]), y_pred, None)
        values = [v.value for v in model.trainable_variables]
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, values)]
        found.append(tf.linalg.global_norm(gradients))
    return np.array(found)


class Frames(LAYERS.Layer):
    """Folds frames into the batch axis inside a layer whose own batch axis is first."""

    def __init__(self):
        super().__init__()
        self.dense = LAYERS.Dense(3, "tanh")

    def build(self, shape):
        self.dense.build((None, 4))

    def call(self, x):
        rows = self.dense(keras.ops.reshape(x, (-1, 4)))
        return keras.ops.mean(keras.ops.reshape(rows, (-1, 5, 3)), axis=1)


class FramesInTheModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = LAYERS.Dense(3, "tanh")

    def call(self, x):
        rows = self.dense(keras.ops.reshape(x, (-1, 4)))
        return keras.ops.mean(keras.ops.reshape(rows, (-1, 5, 3)), axis=1)


class FramesByTimeDistributed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = LAYERS.TimeDistributed(LAYERS.Dense(3, "tanh"))

    def call(self, x):
        return keras.ops.mean(self.dense(x), axis=1)


@pytest.mark.parametrize("self_check", [True, False])
def test_b3_frames_folded_within_a_layer_are_exact(self_check):
    keras.utils.set_random_seed(1)
    stack = [keras.Input((5, 4)), LAYERS.Dense(4), Frames(), LAYERS.Dense(3)]
    model = compiled(keras.Sequential(stack), self_check=self_check)
    np.testing.assert_allclose(
        norms(model, FRAMES, Y), norms_in_a_loop(model, FRAMES, Y), rtol=1e-5
    )
    fit(model, FRAMES, Y)


def folding_functional():
    inputs = keras.Input((5, 4))
    rows = LAYERS.Dense(3, "tanh")(keras.ops.reshape(inputs, (-1, 4)))
    return keras.Model(inputs, keras.ops.mean(keras.ops.reshape(rows, (-1, 5, 3)), axis=1))


@pytest.mark.parametrize("make", [FramesInTheModel, folding_functional])
@pytest.mark.parametrize("self_check", [True, False])
def test_b3_frames_folded_within_the_model_are_refused_and_both_remedies_work(make, self_check):
    model = compiled(make(), self_check=self_check)
    with pytest.raises(
        GradientEngineError, match="folded into the batch axis|called without the batch axis first"
    ) as error:
        fit(model, FRAMES, Y)
    assert "TimeDistributed" in str(error.value)
    assert "gradient_engine='vectorized'" in str(error.value)
    assert int(model.optimizer.iterations) == 0
    model = compiled(model, gradient_engine="vectorized")
    fit(model, FRAMES, Y)
    distributed = compiled(FramesByTimeDistributed())
    fit(distributed, FRAMES, Y)
    distributed.set_weights(model.get_weights())
    by_loop = norms_in_a_loop(model, FRAMES, Y)
    np.testing.assert_allclose(norms(model, FRAMES, Y, vectorized), by_loop, rtol=1e-5)
    np.testing.assert_allclose(norms(distributed, FRAMES, Y), by_loop, rtol=1e-5)


def speech(masked):
    keras.utils.set_random_seed(1)
    mask = [LAYERS.Masking()] if masked else []
    stack = [*mask, LAYERS.LSTM(5, return_sequences=True), LAYERS.Dense(4)]
    return compiled(keras.Sequential([keras.Input((7, 3)), *stack]), keras.losses.CTC())


def test_b6_ctc_takes_masked_inputs():
    """A mask of steps hides no part of a loss that has one value per sequence."""
    x = RANDOM.normal(size=(8, 7, 3)).astype("float32")
    y = RANDOM.integers(1, 4, (8, 2)).astype("float32")
    masked, unmasked = speech(masked=True), speech(masked=False)
    np.testing.assert_allclose(norms(masked, x, y), norms(unmasked, x, y), rtol=1e-5)
    x[1, 4:] = 0.0
    np.testing.assert_allclose(norms(masked, x, y), norms_in_a_loop(masked, x, y), rtol=1e-5)
    fit(masked, x, y)
    # A sequence without any step has no loss.
    x[2] = 0.0
    assert float(norms(masked, x, y)[2]) == 0.0


def test_b6_a_sample_weight_per_step_is_blamed_if_somebody_gave_one():
    with pytest.raises(LossError, match="`sample_weight` has shape"):
        fit(speech(masked=True), np.ones([8, 7, 3], "float32"), np.ones([8, 2], "float32"),
            sample_weight=np.ones([8, 7], "float32"))  # fmt: skip


class Rematerialized(LAYERS.Layer):
    """Calls what reads its weights through `keras.remat`, wrapped early, late, or a layer."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.second, self.kind = LAYERS.Dense(5, "tanh"), LAYERS.Dense(4), kind
        self.wrapped = keras.remat(self.both)

    def build(self, shape):
        self.first.build(shape)
        self.second.build((None, 5))
        self.scale = self.add_weight(shape=(4,), initializer="ones")

    def both(self, x):
        return self.second(self.first(x)) * self.scale

    def call(self, x):
        if self.kind == "early":
            return self.wrapped(x)
        if self.kind == "late":
            return keras.remat(self.both)(x)
        return self.second(keras.remat(self.first)(x)) * self.scale


@pytest.mark.parametrize("kind", ["early", "late", "layer"])
@pytest.mark.parametrize("engine", [layerwise, vectorized])
def test_b7_remat_in_a_layer_is_exact(kind, engine):
    keras.utils.set_random_seed(1)
    stack = [LAYERS.Dense(6), Rematerialized(kind), LAYERS.Dense(3)]
    model = compiled(
        keras.Sequential([keras.Input((6,)), *stack]),
        gradient_engine=engine.__name__.rsplit(".", 1)[1],
    )
    np.testing.assert_allclose(norms(model, X, Y, engine), norms_in_a_loop(model, X, Y), rtol=1e-5)
    before = model.get_weights()
    fit(model, X, Y)
    assert all((new != old).any() for new, old in zip(model.get_weights(), before))


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("saved") / "model")
    keras.Sequential([keras.Input((6,)), LAYERS.Dense(4, "tanh")]).export(path, verbose=False)
    return path


@pytest.mark.parametrize("self_check", [True, False])
@pytest.mark.parametrize("engine", ["layerwise", "vectorized"])
def test_b7_a_weight_that_a_saved_model_hides_is_named(saved_model, engine, self_check):
    hidden = LAYERS.TFSMLayer(saved_model, call_endpoint="serve")
    model = keras.Sequential([keras.Input((6,)), LAYERS.Dense(6), hidden, LAYERS.Dense(3)])
    compiled(model, gradient_engine=engine, self_check=self_check)
    with pytest.raises(GradientEngineError, match=f"of layer '{hidden.name}'.*never move"):
        fit(model, X, Y)
    hidden.trainable = False
    fit(model, X, Y)


def test_b7_a_weight_that_the_loss_does_not_reach_is_no_loss():
    inputs = keras.Input((6,))
    model = keras.Model(inputs, {"a": LAYERS.Dense(3, name="a")(inputs),
                                 "b": LAYERS.Dense(3, name="b")(inputs)})  # fmt: skip
    compiled(model, {"a": CROSS_ENTROPY})
    fit(model, X, {"a": Y})


def sampled(x, y, **arguments):
    return dice_tf.PoissonSampling(8, 4, seed=1).dataset(x, y, **arguments)


def classifier(loss=CROSS_ENTROPY, outputs=1):
    inputs = keras.Input((6,))
    heads = [LAYERS.Dense(3, name=f"head{i}")(inputs) for i in range(outputs)]
    model = keras.Model(inputs, heads if outputs > 1 else heads[0])
    return compiled(model, loss, expected_batch_size=4)


MULTI_HOT = np.array([[1, 0, 1], [0, 1, 1], [1, 1, 1], [0, 0, 0]] * 2, "float32")
BINARY = keras.losses.BinaryCrossentropy(from_logits=True)


@pytest.mark.parametrize("kind", ["arrays", "data set", "sampler"])
@pytest.mark.parametrize(
    "targets, outputs, loss",
    [
        (MULTI_HOT, 1, BINARY),
        (X[:, :3], 1, "mse"),
        ((Y, Y), 2, [CROSS_ENTROPY, CROSS_ENTROPY]),
    ],
    ids=["multi_hot", "numbers", "two_outputs"],
)
def test_b9_class_weights_need_one_class_per_example(kind, targets, outputs, loss):
    model = classifier(loss, outputs)
    data = {
        "arrays": lambda: dict(x=X, y=targets, batch_size=8),
        "data set": lambda: dict(x=tf.data.Dataset.from_tensor_slices((X, targets)).batch(8)),
        "sampler": lambda: dict(x=sampled(X, targets)),
    }[kind]()
    with pytest.raises(SamplingError, match="class_weight.*sample_weight=weights"):
        model.fit(**data, class_weight={0: 1.0, 1: 2.0}, verbose=0)
    assert int(model.optimizer.iterations) == 0
    # The remedy: weights per example, for each output.
    weights = RANDOM.uniform(0, 1, 8).astype("float32")
    weights = (weights, None) if outputs > 1 else weights
    model.fit(sampled(X, targets, sample_weight=weights), verbose=0)


@pytest.mark.parametrize("class_weight", [{"a": {0: 1.0}}, {0.5: 1.0}, {0: -1.0}, [1.0]])
def test_b9_class_weights_are_a_dict_of_weights(class_weight):
    with pytest.raises(SamplingError, match="must be a dict"):
        fit(classifier(), X, Y, class_weight=class_weight)


@pytest.mark.parametrize("targets", ["sparse", "column", "one_hot", "smoothed"])
def test_b9_a_class_that_is_not_listed_has_weight_1(targets):
    one_hot = np.eye(3, dtype="float32")[Y]
    smoothed = one_hot * 0.9 + 0.1 / 3
    y = {"sparse": Y, "column": Y[:, None], "one_hot": one_hot, "smoothed": smoothed}[targets]
    weighted = class_weights.with_class_weights(sampled(X, y), None, {False: 0.25}, is_sampled=True)
    expected = sampled(X, y, sample_weight=np.where(Y == 0, 0.25, 1.0).astype("float32"))
    for (*_, found), (*_, weights) in zip(weighted, expected, strict=True):
        np.testing.assert_array_equal(found, weights)
        # The zeros of padding keep their sign, which is the sampler's mark.
        np.testing.assert_array_equal(np.signbit(found), np.signbit(weights))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
