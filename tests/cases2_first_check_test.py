# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The check of the first batch: rounding is no mixing, a failure is a finding."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dice_tf
from dice_tf.checks import self_check
from dice_tf.errors import (
    DicePrivacyError,
    GradientEngineError,
    PlainGradientsError,
    SamplingError,
    UncheckedGradientsWarning,
)

LAYERS = keras.layers
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 6)).astype("float32")
Y = np.arange(16) % 3
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class SubtractsFromBatchMean(LAYERS.Layer):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def call(self, x):
        return x - self.part * keras.ops.mean(x, axis=0, keepdims=True)


def compiled(model, loss=CROSS_ENTROPY, **arguments):
    arguments = {"expected_batch_size": 8, **arguments}
    optimizer = dice_tf.DiceSGDOptimizer(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, **arguments)
    model.compile(optimizer, loss)
    return model


def rounds_by_batch_size(x):
    """What another order of summation does, on any processor: a last bit."""
    return x * (1.0 + 2.0**-23 * tf.cast(tf.shape(x)[0] - 1, x.dtype))


def amplifying(seed, *layers, last=(), depth=14, **arguments):
    """A network that makes a difference of the last bit 4 times larger with each layer."""
    keras.utils.set_random_seed(seed)
    wave = lambda: LAYERS.Dense(
        32, keras.ops.sin, kernel_initializer=keras.initializers.RandomNormal(stddev=1.0)
    )
    first = [keras.Input((6,)), LAYERS.Lambda(rounds_by_batch_size)]
    waves = [wave() for _ in range(depth)]
    stack = [*first, *waves, *layers, LAYERS.Dense(3), *last]
    return compiled(keras.Sequential(stack), **arguments)


@pytest.mark.parametrize("seed", range(5))
def test_e1_rounding_that_a_deep_network_amplifies_is_no_mixing(seed):
    dice_tf.check_gradients(amplifying(seed), (X, Y))


def test_e1_a_mobilenet_that_was_refused_is_accepted(monkeypatch):
    """With GroupNormalization in place of BatchNormalization, where ReLU6 has kinks."""
    weighed = []
    weigh = self_check._refuse_beyond_rounding
    monkeypatch.setattr(self_check, "_refuse_beyond_rounding", lambda *a: weighed.append(weigh(*a)))
    keras.utils.set_random_seed(2)
    stock = keras.applications.MobileNetV2((64, 64, 3), weights=None, classes=5,
                                           classifier_activation=None)  # fmt: skip
    model = keras.models.clone_model(
        stock,
        clone_function=_with_groups,
        call_function=lambda layer, *args, mask=None, **kwargs: layer(*args, **kwargs),
    )
    random = np.random.default_rng(2)
    x = random.normal(size=(16, 64, 64, 3)).astype("float32")
    dice_tf.check_gradients(compiled(model), (x, random.integers(0, 5, 16)))
    # What differs by more than the tolerance is up to the processor.
    assert weighed in ([], [None])


def _with_groups(layer):
    if not isinstance(layer, LAYERS.BatchNormalization):
        return layer.__class__.from_config(layer.get_config())
    channels = layer.moving_mean.shape[0]
    most = max(1, min(32, channels // 16))
    groups = max(g for g in range(1, most + 1) if channels % g == 0)
    return LAYERS.GroupNormalization(groups, name=layer.name)


@pytest.mark.parametrize("part", [0.002, 0.01, 0.05])
@pytest.mark.parametrize("layers", [0, 14])
def test_e1_weak_mixing_is_found_also_where_rounding_is_amplified(part, layers):
    if layers:
        model = amplifying(1, SubtractsFromBatchMean(part))
    else:
        keras.utils.set_random_seed(1)
        hidden = LAYERS.Dense(5), SubtractsFromBatchMean(part), LAYERS.Dense(3)
        model = compiled(keras.Sequential([keras.Input((6,)), *hidden]))
    with pytest.raises(GradientEngineError, match="depend on the other examples"):
        dice_tf.check_gradients(model, (X, Y))


def test_e1_a_function_of_the_batch_size_is_found_where_rounding_is_amplified():
    size = lambda t: keras.ops.cast(tf.shape(t)[0], "float32")
    model = amplifying(1, last=[LAYERS.Lambda(lambda t: t * size(t))], depth=8)
    with pytest.raises(GradientEngineError, match="depend on the other examples"):
        dice_tf.check_gradients(model, (X, Y))


def test_e1_draws_of_tensorflow_are_warned_of_and_not_taken_for_mixing():
    noisy = LAYERS.Lambda(lambda t: t + tf.random.normal(tf.shape(t)))
    model = compiled(keras.Sequential([keras.Input((6,)), noisy, LAYERS.Dense(3)]))
    with pytest.warns(UncheckedGradientsWarning, match="from run to run"):
        dice_tf.check_gradients(model, (X, Y))


def hardest_of_the_batch(y_true, y_pred):
    """A loss per example against the most similar ones of its batch."""
    scores = tf.matmul(y_pred, y_pred, transpose_b=True)
    hardest, _ = tf.math.top_k(scores, k=3)
    return tf.reduce_sum(hardest, 1) - tf.reduce_sum(y_pred, 1) * tf.cast(y_true, tf.float32)


def fixed_rows_of_the_batch(y_true, y_pred):
    """A loss per example against certain others of its batch, which a small one has not."""
    negatives = tf.gather(y_pred, tf.range(2, 6))
    scores = tf.matmul(y_pred, negatives, transpose_b=True)
    return tf.reduce_sum(scores, 1) - tf.reduce_sum(y_pred, 1) * tf.cast(y_true, tf.float32)


@pytest.mark.parametrize(
    "loss, which",
    [
        (hardest_of_the_batch, "not for one of them alone"),
        (fixed_rows_of_the_batch, "not for 3 of them"),
    ],
)
@pytest.mark.parametrize("engine", ["auto", "vectorized"])
def test_a8_negatives_from_the_batch_are_refused_by_type(loss, which, engine):
    model = keras.Sequential([keras.Input((6,)), LAYERS.Dense(3)])
    compiled(model, loss, gradient_engine=engine)
    with pytest.raises(GradientEngineError, match="depend on each other") as error:
        model.fit(X, Y, batch_size=8, verbose=0)
    # With this engine every example is a batch of its own, the few are none.
    assert which in str(error.value) or engine == "vectorized"
    assert int(model.optimizer.iterations) == 0


def test_a8_what_fails_for_the_whole_batch_too_is_no_finding():
    """A label that is no class: TensorFlow's own error says so."""

    def loss(y_true, y_pred):
        with tf.control_dependencies([tf.debugging.assert_less(y_true, 2.0)]):
            return tf.identity(y_pred[:, 0])

    model = compiled(keras.Sequential([keras.Input((6,)), LAYERS.Dense(3)]), loss)
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.fit(X, Y, batch_size=8, verbose=0)


def test_a8_without_the_check_its_subjects_are_named():
    class Mine(LAYERS.Layer):
        def call(self, x):
            return x

    def my_loss(y_true, y_pred):
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)

    model = keras.Sequential([keras.Input((6,)), Mine(name="own"), LAYERS.Dense(3)])
    compiled(model, my_loss, self_check=False)
    named = r"layer 'own' \(Mine\), loss 'my_loss'"
    with pytest.warns(UncheckedGradientsWarning, match=named) as found:
        model.fit(X, Y, batch_size=8, verbose=0)
    assert len([w for w in found if w.category is UncheckedGradientsWarning]) == 1
    # What the warning names as the way out.
    dice_tf.check_gradients(model, (X, Y))


class Reconstructs(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = LAYERS.Dense(6)
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        self.seen.assign_add(1.0)
        if isinstance(data, tuple):
            return super().train_step((data[0], data[0], *data[2:]))
        x = data["image"] if isinstance(data, dict) else data
        return super().train_step((x, x))


@pytest.mark.parametrize("kind", ["array", "dict", "sampler"])
def test_b8_a_train_step_that_makes_its_targets_is_checked_with_them(kind):
    model = compiled(Reconstructs(), "mse")
    data = {
        "array": lambda: X,
        "dict": lambda: tf.data.Dataset.from_tensor_slices({"image": X}).batch(8),
        "sampler": lambda: dice_tf.PoissonSampling(16, 8, seed=0).dataset(X, Y),
    }[kind]()
    model.fit(data, verbose=0, **({"batch_size": 8} if kind == "array" else {}))
    assert int(model.optimizer.iterations) == 2
    # The look at the first batch changed nothing.
    assert float(model.seen) == 2
    mixing = compiled(Reconstructs(), "mse")
    mixing.dense = keras.Sequential([SubtractsFromBatchMean(1.0), LAYERS.Dense(6)])
    with pytest.raises(GradientEngineError, match="depend on the other examples"):
        mixing.fit(X, batch_size=8, verbose=0)


def test_b8_check_gradients_sees_what_the_train_step_makes():
    dice_tf.check_gradients(compiled(Reconstructs(), "mse"), X)


class HasItsOwnTape(Reconstructs):
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(data) - data))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}


class AssignsItsWeights(Reconstructs):
    def train_step(self, data):
        self.seen.assign_sub(tf.reduce_mean(data))
        return {"loss": 0.0}


@pytest.mark.parametrize(
    "model, named", [(HasItsOwnTape, "private_train_step"), (AssignsItsWeights, "no private step")]
)
def test_b8_a_train_step_of_its_own_is_named_first(model, named):
    model = compiled(model(), "mse")
    with pytest.raises(PlainGradientsError, match=named):
        model.fit(X, batch_size=8, verbose=0)


class TrainsAnother(Reconstructs):
    def train_step(self, data):
        return dice_tf.private_train_step(self.inner, data)


def test_b8_a_train_step_may_step_another_model():
    mixing = SubtractsFromBatchMean(0.5)
    for layers, steps in [((), 2), ((mixing,), 0)]:
        outer = compiled(TrainsAnother(), "mse")
        outer.inner = compiled(keras.Sequential([keras.Input((6,)), *layers, LAYERS.Dense(3)]))
        if layers:
            with pytest.raises(GradientEngineError, match="depend on the other examples"):
                outer.fit(X, Y, batch_size=8, verbose=0)
        else:
            outer.fit(X, Y, batch_size=8, verbose=0)
        assert int(outer.inner.optimizer.iterations) == steps


class Concatenates(Reconstructs):
    """A discriminator whose `train_step` puts fake rows below the real ones."""

    def call(self, x):
        return self.dense(x)[:, :1]

    def train_step(self, data):
        x, _, weights = data
        rows = tf.concat([x, tf.random.normal(tf.shape(x))], 0)
        labels = tf.concat([tf.ones_like(x[:, :1]), tf.zeros_like(x[:, :1])], 0)
        weights = {"none": None, "twice": tf.concat([weights, weights], 0)}[self.kept]
        return keras.Model.train_step(self, (rows, labels, weights))


@pytest.mark.parametrize("kept", ["none", "twice"])
def test_b13_rows_put_below_the_real_ones_are_refused_before_the_first_step(kept):
    model = compiled(Concatenates(), "mse")
    model.kept = kept
    with pytest.raises(SamplingError, match="lost the sampler's mark"):
        model.fit(dice_tf.PoissonSampling(16, 8).dataset(X, Y), verbose=0)
    assert int(model.optimizer.iterations) == 0


def test_b13_a_loop_that_doubles_the_weights_is_refused_at_its_first_step():
    model = compiled(keras.Sequential([keras.Input((6,)), LAYERS.Dense(1)]), "mse")
    (x, y, weights), *_ = dice_tf.PoissonSampling(16, 8).dataset(X, Y[:, None])
    twice = [tf.concat([t, t], 0) for t in (x, y, weights)]
    with pytest.raises(DicePrivacyError, match="second input"):
        dice_tf.private_train_step(model, tuple(twice))
    assert int(model.optimizer.iterations) == 0
    dice_tf.private_train_step(model, (x, y, weights))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
