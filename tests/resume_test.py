# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs that are cut and go on: same steps, same epsilon, and with private files same weights."""

import concurrent.futures
import itertools
import pathlib
import shutil
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from cut_runs import Cut
import killed_run
from softmax_regression import flat, make_model, make_optimizer, make_problem

import dice_tf
from dice_tf import accounting
from dice_tf.checkpoints import bound_keys, private_checkpoints

X, Y = make_problem()
N, B, DELTA, STEPS = len(X), 5, 1e-3, 24
SAMPLINGS = {
    "cyclic": lambda: dice_tf.CyclicPoissonSampling(N, B),
    "cyclic_seeded": lambda: dice_tf.CyclicPoissonSampling(N, B, seed=5),
    "four_groups": lambda: dice_tf.CyclicPoissonSampling(N, B, num_groups=4),
    "poisson": lambda: dice_tf.PoissonSampling(N, B),
    "allocation": lambda: dice_tf.RandomAllocation(N, B),
    "shuffled": lambda: dice_tf.ShuffledEpochs(N, B),
}
pytestmark = pytest.mark.filterwarnings("ignore:This file holds the error")


def make(save_errors=True, **arguments):
    defaults = dict(noise_multiplier=1.0, l2_norm_clip=0.2, expected_batch_size=B, momentum=0.9)
    model = make_model(make_optimizer(save_errors=save_errors, **{**defaults, **arguments}))
    # Keras loads nothing into optimizers that are not built.
    model.optimizer.build(model.trainable_variables)
    return model


def run(folder, sampling, cut=None, steps_per_epoch=8, save_freq="epoch", **arguments):
    """Fits a new model, as a process that has just been started would."""
    model = make(**arguments)
    budget = dice_tf.EpsilonCallback(sampling, DELTA)
    backup = keras.callbacks.BackupAndRestore(
        str(folder), save_freq, double_checkpoint=True, delete_checkpoint=False
    )
    data, fit = sampling.dataset(X, Y, planned_epochs=3), dict(epochs=STEPS // steps_per_epoch)
    if steps_per_epoch != sampling.steps_per_epoch:
        data, fit = data.repeat(), dict(fit, steps_per_epoch=steps_per_epoch)
    try:
        model.fit(data, verbose=0, callbacks=[budget, backup, cut or Cut()], **fit)
    except KeyboardInterrupt:
        pass
    return model, budget


def state(model):
    optimizer = model.optimizer
    return flat([*model.weights, *optimizer.variables, *optimizer.errors])


def test_a_run_killed_at_random_steps_ends_bit_for_bit_like_one_that_was_not(tmp_path):
    """With SIGKILL; the two runs share the key and the sampler of their first backup."""
    folder = str(tmp_path / "run")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        # Meanwhile, a run whose backups hold nothing private.
        other = pool.submit(killed_run.survive, str(tmp_path / "other"), False, 2)
        end, _ = killed_run.survive(folder, True, seed=0)
        twin = killed_run.start(f"{folder}.twin", True)
        released, _ = other.result()
    assert end == twin and end["steps"] == end["draws"] == 120
    # The same epsilon, because what is lost of an epoch was not released.
    assert (released["steps"], released["epsilon"]) == (120, end["epsilon"])
    assert released["weights"] != end["weights"]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_resuming_from_a_private_backup_is_exact(tmp_path, name):
    arguments = dict(feedback_steps=3) if name == "four_groups" else {}
    copy = Cut(copy=(tmp_path / "run", tmp_path / "copy"))
    expected, budget = run(tmp_path / "run", SAMPLINGS[name](), copy, **arguments)
    # A private backup of the first epoch, continued by another process, twice.
    run(tmp_path / "copy", SAMPLINGS[name](), Cut(at=19), **arguments)
    model, resumed = run(tmp_path / "copy", sampling := SAMPLINGS[name](), **arguments)
    assert model.optimizer.errors
    np.testing.assert_array_equal(state(model), state(expected))
    assert int(model.optimizer.iterations) == STEPS and resumed.epsilon() == budget.epsilon()
    assert resumed.epsilon() == accounting.compute_epsilon(
        model.optimizer.mechanism, sampling, STEPS, DELTA
    )


@pytest.mark.parametrize("name", ["cyclic", "four_groups", "poisson"])
def test_backups_may_be_within_a_pass_over_the_data(tmp_path, name):
    """Epochs of Keras shorter than the sampler's, and no multiple of its groups."""
    copy = Cut(copy=(tmp_path / "run", tmp_path / "copy"))
    expected, budget = run(tmp_path / "run", SAMPLINGS[name](), copy, steps_per_epoch=3)
    run(tmp_path / "copy", SAMPLINGS[name](), Cut(at=17), steps_per_epoch=3)
    model, resumed = run(tmp_path / "copy", SAMPLINGS[name](), steps_per_epoch=3)
    np.testing.assert_array_equal(state(model), state(expected))
    assert resumed.accounted_steps() == STEPS and resumed.epsilon() == budget.epsilon()


@pytest.mark.parametrize("private", [True, False])
def test_backups_in_the_middle_of_an_epoch_count_every_step(tmp_path, private):
    """Keras restarts the epoch from the weights of its middle: those steps are made twice."""
    sampling = SAMPLINGS["four_groups"]
    run(tmp_path, sampling(), Cut(at=14), save_freq=5, save_errors=private)
    model, budget = run(tmp_path, sampling(), save_freq=5, save_errors=private)
    saved = int(model.optimizer.iterations) - 16
    assert 8 < saved < 14 and saved % 4 == 2
    # A sampler that goes on needs no new cycle; a fresh one does, and the open one counts.
    assert budget.accounted_steps() == 16 + (saved if private else 12)


def test_a_kill_while_the_backup_is_written_costs_one_epoch(tmp_path):
    copy = Cut(copy=(tmp_path / "run", tmp_path / "copy"))
    expected, _ = run(tmp_path / "run", SAMPLINGS["cyclic"](), copy)
    run(tmp_path / "copy", SAMPLINGS["cyclic"](), Cut(at=18))
    latest = tmp_path / "copy" / "latest.weights.h5"
    latest.write_bytes(latest.read_bytes()[:2000])
    model, _ = run(tmp_path / "copy", SAMPLINGS["cyclic"]())
    np.testing.assert_array_equal(state(model), state(expected))


def test_a_released_backup_resumes_with_fresh_noise_and_an_error_of_zero(tmp_path):
    run(tmp_path, SAMPLINGS["cyclic"](), Cut(at=13), save_errors=False)
    shutil.copytree(tmp_path, tmp_path / "copy")
    ends = [
        run(folder, SAMPLINGS["cyclic"](), save_errors=False)
        for folder in (tmp_path, tmp_path / "copy")
    ]
    assert np.abs(state(ends[0][0]) - state(ends[1][0])).max() > 0.01
    for model, budget in ends:
        assert int(model.optimizer.iterations) == budget.accounted_steps() == STEPS


@pytest.mark.parametrize("seeded", [False, True])
def test_keras_files_resume_and_keep_what_they_are(tmp_path, seeded):
    path = tmp_path / "private.keras"
    sampling = dice_tf.CyclicPoissonSampling(N, B, seed=1 if seeded else None)
    model = make()
    fit = lambda model, sampling: model.fit(
        sampling.dataset(X, Y, planned_epochs=2), verbose=0,
        callbacks=[dice_tf.EpsilonCallback(sampling, DELTA)],
    )  # fmt: skip
    fit(model, sampling)
    model.save(path)
    loaded = keras.models.load_model(path)
    assert loaded.optimizer.save_errors
    again = dice_tf.CyclicPoissonSampling(N, B, seed=1 if seeded else None)
    fit(model, sampling)
    fit(loaded, again)
    np.testing.assert_array_equal(state(loaded), state(model))
    assert again.assignment == sampling.assignment


def test_tf_checkpoints_resume_a_custom_loop(tmp_path):
    def loop(steps, restore=None, save=None):
        model, sampling = make(), SAMPLINGS["cyclic"]()
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        if restore:
            checkpoint.read(restore).assert_consumed()
        private_checkpoints.continue_sampling(model, sampling)
        for step, batch in enumerate(sampling.dataset(X, Y).repeat().take(steps), 1):
            dice_tf.private_train_step(model, batch)
            if save is not None and step == 5:
                save.append(checkpoint.write(str(tmp_path / "checkpoint")))
        return model

    expected = loop(12, save=(saved := []))
    np.testing.assert_array_equal(state(loop(7, restore=saved[0])), state(expected))


def two_ends(path, change):
    """Trains one step from one private file, as it was and after a change; returns v + w."""
    directions = []
    for changed in (False, True):
        model, x = make(learning_rate=1.0, momentum=0.0), X[:B].copy()
        model.load_weights(path)
        before = flat(model.trainable_variables)
        if changed:
            change(model, x)
        model.train_on_batch(x, Y[:B])
        directions.append(before - flat(model.trainable_variables))
    return directions


def test_noise_is_the_same_only_for_the_same_direction(tmp_path):
    path = tmp_path / "private.weights.h5"
    model = make(learning_rate=1.0, momentum=0.0)
    model.train_on_batch(X[:B], Y[:B])
    model.save_weights(path)
    one, same = two_ends(path, lambda model, x: None)
    np.testing.assert_array_equal(one, same)
    stddev = model.optimizer.mechanism.noise_stddev
    other_data = lambda model, x: np.add(x, 1e-4, out=x)
    other_error = lambda model, x: model.optimizer.errors[1].assign(np.ones(4))
    for change in (other_data, other_error):
        # Of the kernel, whose direction hardly changes, or not at all.
        difference = np.subtract(*two_ends(path, change))[:24]
        # As for independent noise, of twice the variance; the same noise gives about 0.
        assert 0.3 < np.std(difference) / (np.sqrt(2) * stddev) < 3


@pytest.mark.parametrize("late", [False, True])
def test_a_private_file_brings_no_noise_to_runs_whose_files_are_released(tmp_path, late):
    """All train on the same data: the same noise would make two of the ends equal."""
    path = tmp_path / "private.keras"
    original = make(learning_rate=1.0, momentum=0.0, save_errors=not late)
    original.train_on_batch(X[:B], Y[:B])
    # A flag reaches the steps that are traced later, and no others.
    original.optimizer.save_errors = True
    original.save(path)
    runs = [original, *(keras.models.load_model(path) for _ in range(3))]
    for model in runs[:3]:
        model.optimizer.save_errors = False
    # An original that was traced so goes on bound; the file holds the same key.
    runs = runs if late else runs[:3]
    for model in runs:
        model.train_on_batch(X[:B], Y[:B])
    stddev = original.optimizer.mechanism.noise_stddev
    ends = [flat(model.trainable_variables) for model in runs]
    for one, other in itertools.combinations(ends, 2):
        assert 0.3 < np.std(one - other) / (np.sqrt(2) * stddev) < 3


def test_bound_keys_depend_on_every_bit_and_look_random():
    key = tf.constant([1, 2])
    vector = np.linspace(-1, 1, 65).astype("float32")
    keys = {tuple(bound_keys.bind_key(key, [tf.constant(vector)]).numpy())}
    for entry in range(65):
        flipped = vector.copy().view(np.uint32)
        flipped[entry] ^= np.uint32(1 << (entry % 32))
        tensors = [tf.constant(part) for part in np.split(flipped.view(np.float32), [7])]
        keys.add(tuple(bound_keys.bind_key(key, tensors).numpy()))
    swapped = tf.constant(vector[::-1].copy())
    keys.add(tuple(bound_keys.bind_key(key, [swapped]).numpy()))
    keys.add(tuple(bound_keys.bind_key(tf.constant([1, 3]), [swapped]).numpy()))
    assert len(keys) == 68
    ones = np.unpackbits(np.array(sorted(keys), np.int32).view(np.uint8)).mean()
    assert abs(ones - 0.5) < 4 * 0.5 / np.sqrt(68 * 64)


@pytest.mark.parametrize(
    "arguments",
    [{"error_norm_clip": 0.5}, {"noise_multiplier": 2.0}, {"feedback_steps": 2}, {"noise_seed": 1}],
    ids=str,
)
def test_another_mechanism_takes_no_private_state(tmp_path, arguments):
    """An error of the old size would exceed the sensitivity that the accountant assumes."""
    path = tmp_path / "private.weights.h5"
    model = make()
    model.train_on_batch(X[:B], Y[:B])
    model.save_weights(path)
    other = make(**arguments)
    with pytest.warns(UserWarning, match="other privacy parameters"):
        other.load_weights(path)
    assert int(other.optimizer.iterations) == 1 and not np.any(flat(other.optimizer.errors))
    key = lambda m: m.optimizer._private.noise_key.read().numpy()
    assert np.any(key(other) != key(model))
    # Nor does a run whose files are for release.
    plain = make(save_errors=False)
    plain.load_weights(path)
    assert int(plain.optimizer.iterations) == 1 and not np.any(flat(plain.optimizer.errors))
    assert np.any(key(plain) != key(model))


@pytest.mark.parametrize(
    "other", [dice_tf.CyclicPoissonSampling(N, B, num_groups=4), dice_tf.PoissonSampling(N, B)]
)
def test_another_sampling_does_not_take_the_place_of_the_stored_one(tmp_path, other):
    sampling, path = dice_tf.CyclicPoissonSampling(N, B), tmp_path / "private.weights.h5"
    model = make()
    private_checkpoints.continue_sampling(model, sampling)
    model.save_weights(path)
    resumed, before = make(), (other.entropy, other.assignment)
    resumed.load_weights(path)
    assert not private_checkpoints.continue_sampling(resumed, other)
    assert (other.entropy, other.assignment) == before and other.position == 0


@pytest.mark.parametrize("peeked", [False, True])
def test_draws_are_never_used_a_second_time(tmp_path, peeked):
    """After a batch that was looked at, the count of steps is not that of draws any more."""
    sampling, path = SAMPLINGS["cyclic"](), tmp_path / "private.weights.h5"
    model, data = make(), sampling.dataset(X, Y)
    private_checkpoints.continue_sampling(model, sampling)
    if peeked:
        next(iter(data))
    for batch in data:
        dice_tf.private_train_step(model, batch)
    model.save_weights(path)
    resumed, again = make(), SAMPLINGS["cyclic"]()
    resumed.load_weights(path)
    entropy = again.entropy
    assert private_checkpoints.continue_sampling(resumed, again) is not peeked
    assert (again.entropy == entropy) is peeked and again.position == (0 if peeked else 8)
    # With another assignment to groups the error is forgotten when `fit` begins.
    assert (again.assignment == sampling.assignment) is not peeked


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
