# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""One `Run` a model, one callback that writes down its passes, one count of its steps."""

import contextlib
import gc
import os
import sys
import threading
import weakref

import keras
import numpy as np
import pytest

import dice_tf
from dice_tf.errors import PlainGradientsError, SamplingError
from dice_tf.ledger import provenance
from dice_tf.ledger.sampling_passes import PassCallback
from dice_tf.training import run as run_lib

N, B, DELTA = 64, 8, 1e-3
X = np.random.default_rng(0).normal(size=(N, 4)).astype("float32")
Y = X[:, :1]


def make(optimizer=None, **arguments):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    own = dict(l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=B)
    model.compile(optimizer or dice_tf.DiceSGDOptimizer(**own, **arguments), loss="mse")
    return model


class Look(keras.callbacks.Callback):
    """Takes note of the classes of all callbacks that pass on what `fit` calls."""

    def on_train_begin(self, logs=None):
        frame = sys._getframe()
        while not isinstance(frame.f_locals.get("self"), keras.callbacks.CallbackList):
            frame = frame.f_back
        self.classes = [type(callback) for callback in frame.f_locals["self"].callbacks]


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("with_budget", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
def test_one_callback_writes_down_passes_and_comes_first(sampled, with_budget, as_list):
    model, look = make(), Look()
    sampling = dice_tf.PoissonSampling(N, B) if sampled else dice_tf.ShuffledEpochs(N, B)
    budgets = [dice_tf.EpsilonCallback(sampling, DELTA)] if with_budget else []
    callbacks = [look, *budgets]
    if as_list:
        callbacks = keras.callbacks.CallbackList(
            callbacks, add_history=True, model=model, epochs=1, steps=N // B
        )
    data = (sampling.dataset(X, Y),) if sampled else (X, Y)
    with contextlib.nullcontext() if with_budget else pytest.warns(match="took 8 private steps"):
        model.fit(*data, verbose=0, callbacks=callbacks, **({} if sampled else {"batch_size": B}))
    passes = [issubclass(c, PassCallback) for c in look.classes]
    assert passes.count(True) == 1 and passes[0]
    record = provenance.read_record(model.optimizer)
    assert record["sampling"] == provenance.sampling_name(sampling)
    assert record["steps"] == N // B and record["loop_steps"] == 0


def test_what_a_pass_shows_is_written_down_after_the_claim_that_it_contradicts():
    model, parts = make(), [dice_tf.ShuffledEpochs(N, B).dataset(X, Y) for _ in range(2)]
    budget = dice_tf.EpsilonCallback(dice_tf.ShuffledEpochs(2 * N, B), DELTA)
    with pytest.raises(SamplingError, match="by several in one data set"):
        model.fit(parts[0].concatenate(parts[1]), verbose=0, callbacks=[budget])
    # At the second batch, not at the end of the epoch.
    record = provenance.read_record(model.optimizer)
    assert record["steps"] == 1 and record["sampling"] == provenance.SEVERAL


def test_a_run_is_one_per_model_and_goes_with_it():
    first, second = make(), make()
    assert run_lib.run_of(first) is run_lib.run_of(first) is not run_lib.run_of(second)
    with pytest.warns(UserWarning, match="took 8 private steps"):
        first.fit(X, Y, batch_size=B, verbose=0)
    assert run_lib.run_of(first).steps == N // B and run_lib.run_of(second).steps == 0
    assert run_lib.run_of(first).trained_by() is first.optimizer
    assert run_lib.run_of(first).checks.compared and run_lib.run_of(second).checks is None
    known = weakref.ref(run_lib.run_of(second))
    del second
    gc.collect()
    assert known() is None


@pytest.mark.parametrize(
    "ask",
    [
        lambda model: dice_tf.private_train_step(model, (X[:B], Y[:B])),
        lambda model: dice_tf.check_gradients(model, (X[:B], Y[:B])),
        lambda model: dice_tf.run_epsilon(model, dice_tf.PoissonSampling(N, B), DELTA),
        lambda model: dice_tf.continue_sampling(model, dice_tf.PoissonSampling(N, B)),
    ],
)
def test_all_that_needs_a_private_optimizer_names_the_one_it_got(ask):
    with pytest.raises(PlainGradientsError, match="optimizer=Adam. Compile the model with Dice"):
        ask(make("adam"))


def test_steps_of_an_object_are_its_draws_without_those_that_loading_left_out():
    saved, loaded = make(noise_seed=1), make(noise_seed=1)
    for _ in range(5):
        saved.train_on_batch(X[:B], Y[:B])
    for _ in range(2):
        loaded.train_on_batch(X[:B], Y[:B])
    store = {}
    saved.optimizer.save_own_variables(store)
    loaded.optimizer.load_own_variables(store)
    private = loaded.optimizer._private
    # With a seed, the draws of the other process are not to come again.
    assert int(private.process_draws) == 5 and private.steps_here() == 2
    loaded.train_on_batch(X[:B], Y[:B])
    assert int(private.process_draws) == 6 and private.steps_here() == 3
    # Nor are those of this one, if it goes back.
    loaded.optimizer.load_own_variables(store)
    assert int(private.process_draws) == 6 and private.steps_here() == 3
    assert int(loaded.optimizer.iterations) == 5


def test_one_batch_of_fit_passes_twelve_modules_outside_the_engine():
    sampling = dice_tf.CyclicPoissonSampling(N, B)
    base, passed = os.path.dirname(dice_tf.__file__) + os.sep, set()

    def profile(frame, event, argument):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(base):
            passed.add(os.path.relpath(name, base))

    class Window(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                passed.clear()
                sys.setprofile(profile)
            elif batch == 3:
                sys.setprofile(None)

    callbacks = [Window(), dice_tf.EpsilonCallback(sampling, DELTA)]
    threading.setprofile(profile)
    try:
        make().fit(sampling.dataset(X, Y), verbose=0, callbacks=callbacks)
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    outside = {name for name in passed if not name.startswith("engine")}
    assert "training/epsilon_callback.py" in outside and len(outside) <= 12, sorted(outside)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
