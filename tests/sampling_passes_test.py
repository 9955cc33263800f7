# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Several `fit` calls of one run, with and without `EpsilonCallback`."""

import warnings

import keras
import numpy as np
import pytest

from dice_tf.errors import AccountingError, SamplingError
from dice_tf.ledger import provenance
from dice_tf.sampling import CyclicPoissonSampling, PoissonSampling, ShuffledEpochs
from dice_tf.training.epsilon_callback import EpsilonCallback
from dice_tf.training.optimizers import DiceSGDOptimizer

N, B, DELTA = 60, 10, 1e-3
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(N, 3)).astype("float32"), RNG.integers(3, size=N)


def make_optimizer(**arguments):
    return DiceSGDOptimizer(
        learning_rate=0.1,
        l2_norm_clip=0.1,
        noise_multiplier=4.0,
        expected_batch_size=B,
        noise_seed=0,
        **arguments,
    )


def make_model(**arguments):
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(3, activation="softmax", kernel_initializer="ones")]
    )
    model.compile(make_optimizer(**arguments), loss="sparse_categorical_crossentropy")
    return model


class ErrorAtFirstStep(keras.callbacks.Callback):
    """Keeps whether the error was 0 as the first step of a `fit` began."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 0:
            self.is_zero = all(not error.numpy().any() for error in self.model.optimizer.errors)


def fit(model, sampling, *callbacks, **arguments):
    model.fit(sampling.dataset(X, Y), verbose=0, callbacks=list(callbacks) or None, **arguments)


def record(model):
    return provenance.unpack_record(model.optimizer.sampling_record.numpy())


def starts_from_zero(model, sampling, *callbacks):
    watcher = ErrorAtFirstStep()
    fit(model, sampling, watcher, *callbacks)
    return watcher.is_zero


@pytest.mark.parametrize("observed", [False, True])
def test_other_groups_start_from_an_error_of_zero(observed):
    one, other = CyclicPoissonSampling(N, B), CyclicPoissonSampling(N, B)
    model = make_model()
    for sampling, expected in [(one, True), (one, False), (other, True), (other, False)]:
        callbacks = [EpsilonCallback(sampling, DELTA)] if observed else []
        assert starts_from_zero(model, sampling, *callbacks) == expected
    # A callback that is added later has nothing to begin anew.
    callback = EpsilonCallback(other, DELTA)
    assert not starts_from_zero(model, other, callback)
    assert callback.accounted_steps() == 5 * one.steps_per_epoch


def test_change_of_groups_between_callbacks_does_not_go_unseen():
    one, other = CyclicPoissonSampling(N, B), CyclicPoissonSampling(N, B)
    model = make_model()
    fit(model, one, EpsilonCallback(one, DELTA))
    assert starts_from_zero(model, other)
    assert not starts_from_zero(model, other, EpsilonCallback(other, DELTA))


@pytest.mark.parametrize("mapped", [False, True])
def test_pass_that_was_cut_is_closed_without_a_callback(mapped):
    sampling, model = CyclicPoissonSampling(N, B), make_model()
    data = sampling.dataset(X, Y)
    data = data.map(lambda x, y, w: (2 * x, y, w)).prefetch(1) if mapped else data
    model.fit(data, steps_per_epoch=3, verbose=0)
    assert starts_from_zero(model, sampling)
    assert record(model)["unfinished_steps"] == 1
    callback = EpsilonCallback(sampling, DELTA)
    fit(model, sampling, callback)
    assert callback.accounted_steps() == 3 + 1 + 2 * sampling.steps_per_epoch


def test_shuffled_epoch_that_was_cut_without_a_callback_counts_in_full():
    sampling, model = ShuffledEpochs(N, B), make_model()
    fit(model, sampling, steps_per_epoch=2)
    callback = EpsilonCallback(sampling, DELTA)
    fit(model, sampling, callback)
    assert callback.accounted_steps() == 2 * sampling.steps_per_epoch


def test_passes_that_were_cut_count_in_full_in_the_next_process(tmp_path):
    path, sampling = tmp_path / "run.weights.h5", ShuffledEpochs(N, B)
    for _ in range(3):
        model = make_model()
        if path.exists():
            model.load_weights(path)
        fit(model, sampling, steps_per_epoch=2)
        model.save_weights(path)
    callback = EpsilonCallback(sampling, DELTA)
    fit(model, sampling, callback)
    assert callback.accounted_steps() == 4 * sampling.steps_per_epoch


@pytest.mark.parametrize("in_list", [False, True])
def test_callbacks_of_every_kind_are_kept(in_list):
    model, watcher = make_model(), ErrorAtFirstStep()
    whole_list = keras.callbacks.CallbackList([watcher], add_history=True, model=model)
    callbacks = whole_list if in_list else watcher
    sampling = PoissonSampling(N, B)
    model.fit(sampling.dataset(X, Y), verbose=0, callbacks=callbacks)
    assert watcher.is_zero
    assert record(model)["assignment"] == sampling.assignment


def test_other_batch_size_than_the_optimizers_is_refused_without_a_callback():
    sampling = PoissonSampling(N, 2 * B)
    with pytest.raises(AccountingError, match=f"expected_batch_size={2 * B}"):
        fit(make_model(), sampling)


def test_another_private_optimizer_on_the_same_model_warns():
    sampling, model = PoissonSampling(N, B), make_model()
    fit(model, sampling)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.compile(model.optimizer, loss="sparse_categorical_crossentropy")
        fit(model, sampling)
    model.compile(make_optimizer(), loss="sparse_categorical_crossentropy")
    steps = 2 * sampling.steps_per_epoch
    with pytest.warns(UserWarning, match=f"trained this model for {steps} steps.*add up") as caught:
        fit(model, sampling)
    assert caught[0].filename == __file__


def interrupt(model, sampling, x, y, *callbacks):
    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.fit(sampling.dataset(x, y), verbose=0, callbacks=[*callbacks, Interrupt()])


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("cls", [PoissonSampling, CyclicPoissonSampling, ShuffledEpochs])
def test_another_number_of_examples_is_not_accounted_by_one_of_them(cls, observed, cut):
    model, small, large = make_model(), cls(N, B), cls(10 * N, B)
    message = "a sampling with other parameters" if large.amplified else "epochs of another length"
    callbacks = [EpsilonCallback(small, DELTA)] if observed else []
    if cut:
        interrupt(model, small, X, Y, *callbacks)
    else:
        fit(model, small, *callbacks)
    x, y = np.tile(X, (10, 1)), np.tile(Y, 10)
    train = lambda *callbacks: model.fit(large.dataset(x, y), verbose=0, callbacks=callbacks)
    with pytest.raises(SamplingError, match=message):
        train(EpsilonCallback(large, DELTA / 10))
    # The refusal changes nothing, and a `fit` that nobody watches is not forgotten.
    fit(model, small, EpsilonCallback(small, DELTA))
    train()
    with pytest.raises(SamplingError, match=message):
        fit(model, small, EpsilonCallback(small, DELTA))


@pytest.mark.parametrize("cls", [PoissonSampling, CyclicPoissonSampling, ShuffledEpochs])
def test_steps_do_not_vanish_with_the_step_counter(cls):
    model, sampling = make_model(), cls(N, B)
    fit(model, sampling, EpsilonCallback(sampling, DELTA))
    model.optimizer.iterations.assign(0)
    with pytest.raises(SamplingError, match="is 0, but 6 steps were recorded"):
        fit(model, sampling, EpsilonCallback(sampling, DELTA, target_epsilon=100.0))


def test_steps_that_were_discarded_are_named(tmp_path):
    model, sampling, path = make_model(), PoissonSampling(N, B), tmp_path / "run.weights.h5"
    fit(model, sampling)
    model.save_weights(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fit(model, sampling)
    model.load_weights(path)
    with pytest.warns(UserWarning, match="took 6 steps that are not in epsilon"):
        fit(model, sampling)


WEIGHTS = {0: 0.5, 1: 2.0, 2: 0.0}


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("make_sampling", [CyclicPoissonSampling, ShuffledEpochs])
def test_class_weights_are_weights_of_the_examples(make_sampling, one_hot):
    user = RNG.uniform(0.5, 2.0, size=N)
    targets = np.eye(3, dtype=np.float32)[Y] if one_hot else Y
    loss = f"{'' if one_hot else 'sparse_'}categorical_crossentropy"

    def trained(weights, **arguments):
        # The factors of clipping are below 1 for some examples and 1 for others.
        model = make_model()
        model.compile(make_optimizer(), loss=loss)
        sampling = make_sampling(N, B, seed=1)
        data = sampling.dataset(X, targets, sample_weight=weights)
        model.fit(data, verbose=0, callbacks=[EpsilonCallback(sampling, DELTA)], **arguments)
        return model.get_weights()

    by_class = trained(user, class_weight=WEIGHTS)
    by_example = trained(user * np.array([WEIGHTS[label] for label in Y]))
    for one, other in zip(by_class, by_example, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
    assert np.abs(by_class[0] - trained(user)[0]).max() > 1e-4


def test_negative_class_weights_are_refused():
    with pytest.raises(SamplingError, match=r"class_weight=\{0: -1.0\}"):
        fit(make_model(), PoissonSampling(N, B), class_weight={0: -1.0})


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
