# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Copies, pickles and forks repeat no noise and no draws: case D6."""

import copy
import importlib.util
import itertools
import json
import os
import pathlib
import pickle
import signal
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from cases2_saving_test import COPIES, N, X, Y, fit, make, quiet
from softmax_regression import BATCH

import dice_tf
from dice_tf.checkpoints import private_checkpoints
from dice_tf.mechanism import noise


def keys_of(optimizer):
    private = optimizer._private
    return [tuple(key.read().numpy()) for key in (private.noise_key, private.process_key)]


def test_d6_no_two_optimizers_have_the_same_noise_key():
    model = make()
    fit(model)
    optimizer = model.optimizer
    others = [way(optimizer) for way in COPIES.values()]
    others += [way(model).optimizer for way in (*COPIES.values(), keras.models.clone_model)]
    others.append(type(optimizer).from_config(optimizer.get_config()))
    keys = [key for one in (optimizer, *others) for key in keys_of(one)]
    assert len(set(keys)) == len(keys) == 2 * 9
    # Nor is a key, or a seed, in what is written.
    for key in (optimizer._private.process_key, noise.NoiseKey(seed=123456789)):
        written = pickle.dumps(key)
        assert key.read().numpy().tobytes() not in written and b"123456789" not in written
        assert pickle.loads(written).seed is None


@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow_privacy") is None, reason="needs tensorflow-privacy"
)
@pytest.mark.parametrize("name", COPIES)
def test_d6_a_copied_query_does_not_repeat_its_noise(name):
    from dice_tf.tf_privacy import DiceSumQuery

    def release(query):
        state = query.initial_global_state()
        params, sample = query.derive_sample_params(state), query.initial_sample_state()
        sample = query.accumulate_record(params, sample, tf.zeros([4]))
        return query.get_noised_result(sample, state)[0].numpy()

    query = DiceSumQuery(1.0, 1.0, tf.TensorSpec([4]))
    release(query)
    other = COPIES[name](query)
    releases = [release(q) for q in (query, other, query, other)]
    for one, another in itertools.combinations(releases, 2):
        assert np.abs(one - another).min() > 0


def draws_of(sampling):
    return [tuple(batch[0].numpy().ravel()) for batch in sampling.dataset(np.arange(N))]


@quiet
@pytest.mark.parametrize("make_sampling", [
    dice_tf.PoissonSampling, dice_tf.CyclicPoissonSampling, dice_tf.ShuffledEpochs
])  # fmt: skip
def test_d6_a_copied_sampler_does_not_repeat_its_draws(make_sampling):
    """With private checkpoints the number of an iteration decides what it draws."""
    sampling, model = make_sampling(N, BATCH), make(save_errors=True)
    private_checkpoints.continue_sampling(model, sampling)
    first = draws_of(sampling)
    for way in (copy.copy, copy.deepcopy):
        other = way(sampling)
        assert other is sampling and other.position == sampling.position
    sent = COPIES["pickle"](sampling)
    assert sent == sampling and sent.position == sent.draws == 0
    assert (sent.entropy, sent.assignment) != (sampling.entropy, sampling.assignment)
    drawn = [first, draws_of(copy.deepcopy(sampling)), draws_of(sampling), draws_of(sent)]
    assert len({tuple(draws) for draws in drawn}) == 4
    # With a seed the user has asked for the same draws in every process.
    seeded = make_sampling(N, BATCH, seed=3)
    assert draws_of(COPIES["pickle"](seeded)) == draws_of(seeded)
    assert str(sampling.entropy).encode() not in pickle.dumps(sampling)


def test_d6_a_copied_callback_counts_the_batches_of_the_same_sampler():
    """As keras_tuner copies callbacks for every trial."""
    sampling = dice_tf.CyclicPoissonSampling(N, BATCH)
    callbacks = [dice_tf.EpsilonCallback(sampling, delta=1e-3)]
    for _ in range(2):
        model, copied = make(), copy.deepcopy(callbacks)
        model.fit(sampling.dataset(X, Y), verbose=0, callbacks=copied)
        assert copied[0].accounted_steps() == sampling.steps_per_epoch
        assert callbacks[0].model is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_d6_a_forked_process_has_a_key_and_draws_of_its_own():
    secret, seeded = noise.NoiseKey(), noise.NoiseKey(seed=5)
    samplings = [dice_tf.CyclicPoissonSampling(N, BATCH, seed=seed) for seed in (None, 5)]
    samplings[0].move_to(samplings[0].entropy, samplings[0].assignment, 3)

    def state():
        keys = [key.read().numpy().tolist() for key in (secret, seeded)]
        entropies = [[s.entropy, s.assignment, s.position] for s in samplings]
        group = samplings[0]._groups()[0].tolist()
        numbered = len(samplings[0]._begin_iteration()) == 2
        # No noise is drawn: compiled functions hang in forked processes of some releases.
        return keys, entropies, group, numbered

    before = state()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # Should TensorFlow hang.
        with os.fdopen(writer, "w") as pipe:
            json.dump(state(), pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        keys, entropies, group, numbered = json.load(pipe)
    assert os.waitpid(child, 0)[1] == 0
    assert keys[0] != before[0][0] and keys[1] == before[0][1]
    assert group != before[2]
    assert entropies[0][0] != before[1][0][0] and entropies[0][1] != before[1][0][1]
    assert entropies[1] == before[1][1]
    # Numbered iterations draw the same batches from the same entropy.
    assert before[3] and not numbered
    # The parent goes on as it was.
    assert state()[0] == before[0]


def test_d6_a_step_compiled_before_a_fork_takes_the_fresh_key(monkeypatch):
    model = make()
    model.train_on_batch(X[:BATCH], Y[:BATCH])
    before = model.optimizer._private.process_key._variable.numpy()
    # Graphs hang in most forked processes, so that one is not started here.
    monkeypatch.setattr(noise, "_forks", noise._forks + 1)
    model.train_on_batch(X[:BATCH], Y[:BATCH])
    assert np.all(model.optimizer._private.process_key._variable.numpy() != before)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
