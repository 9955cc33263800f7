# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Optimizers that are loaded into ones of other noise, and runs that compose: case D2."""

from cases2_ledger_test import DELTA, B, N, X, Y, fit, make, make_optimizer, record
import keras
import pytest
import tensorflow as tf

import dice_tf
from dice_tf import accounting
from dice_tf.errors import AccountingError
from dice_tf.ledger import provenance

pytestmark = [
    pytest.mark.filterwarnings("ignore::dice_tf.errors.UnaccountedStepsWarning"),
    pytest.mark.filterwarnings("ignore:This file holds the error"),
]


class QuietSGD(dice_tf.DiceSGDOptimizer):
    """Its files are loaded with 20 times the noise."""

    @classmethod
    def from_config(cls, config, custom_objects=None):
        return super().from_config(dict(config, noise_multiplier=20.0), custom_objects)


@pytest.fixture(scope="module")
def weak(tmp_path_factory):
    """A run of eight steps with hardly any noise, and its files."""
    folder, sampling = tmp_path_factory.mktemp("weak"), dice_tf.PoissonSampling(N, B)
    model = make(0.05, optimizer=QuietSGD)
    fit(model, sampling)
    model.save(folder / "run.keras")
    model.save_weights(folder / "run.weights.h5")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    checkpoint.write(str(folder / "checkpoint"))
    return model, sampling, folder


def load_weights(model, folder):
    model.load_weights(folder / "run.weights.h5")


def load_checkpoint(model, folder):
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    checkpoint.read(str(folder / "checkpoint"))


def restore_backup(model, folder):
    backup = keras.callbacks.BackupAndRestore(str(folder / "backup"), delete_checkpoint=False)
    if not (folder / "backup").exists():
        original = make(0.05)
        original.load_weights(folder / "run.weights.h5")
        backup.set_model(original)
        original.optimizer.build(original.trainable_variables)
        backup.on_train_begin()
        backup.on_epoch_end(0)
    backup.set_model(model)
    backup.on_train_begin()


def state_tree(model, folder):
    original = make(0.05)
    original.load_weights(folder / "run.weights.h5")
    original.optimizer.build(original.trainable_variables)
    tree = original.get_state_tree()["optimizer_variables"]
    ours = model.get_state_tree()["optimizer_variables"]
    # Optimizers are numbered, and their names are part of those of their variables.
    (old,), (new,) = tree, ours
    model.set_state_tree({"optimizer_variables": {new: tree[old]}})


@pytest.mark.parametrize("load", [load_weights, load_checkpoint, restore_backup, state_tree])
@pytest.mark.parametrize("built", [True, False])
def test_d2_steps_of_other_noise_are_refused(weak, load, built):
    _, sampling, folder = weak
    model = make(20.0)
    if built or load is state_tree:
        model.optimizer.build(model.trainable_variables)
    load(model, folder)
    with pytest.raises(AccountingError, match="other privacy parameters.*noise_multiplier=20"):
        dice_tf.run_epsilon(model, sampling, DELTA)
    if load is load_weights:
        for callbacks in ([], [dice_tf.EpsilonCallback(sampling, DELTA)]):
            with pytest.raises(AccountingError, match="of the 8 steps.*compose_epsilon"):
                fit(model, sampling, callbacks=callbacks)
        # In a loop that asks nobody, the record still knows of both.
        model.train_on_batch(*next(iter(sampling.dataset(X, Y))))
        assert record(model)["mechanism"] == provenance.SEVERAL


def test_d2_a_model_that_is_loaded_with_other_noise_is_refused_and_the_remedy_works(weak):
    original, sampling, folder = weak
    model = keras.models.load_model(folder / "run.keras", {"QuietSGD": QuietSGD})
    assert model.optimizer.noise_multiplier == 20.0
    with pytest.raises(AccountingError, match="new optimizer.*compose_epsilon"):
        fit(model, sampling, callbacks=[dice_tf.EpsilonCallback(sampling, DELTA)])
    model.compile(make_optimizer(20.0), "mse", jit_compile=False)
    fit(model, sampling)
    first, second = (dice_tf.accounted_run(m, sampling) for m in (original, model))
    both = accounting.compose_epsilon([first, second], DELTA)
    assert both > dice_tf.run_epsilon(original, sampling, DELTA) > 1000
    assert dice_tf.run_epsilon(model, sampling, DELTA) < 1


PARTS = [dict(l2_norm_clip=1.1), dict(error_norm_clip=0.5), dict(expected_batch_size=20),
         dict(bound_residuals=False), dict(feedback_steps=2), dict(num_microbatches=10),
         dict(clipping="automatic")]  # fmt: skip


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_d2_all_that_enters_epsilon_has_another_name(part):
    arguments = dict(l2_norm_clip=1.0, noise_multiplier=2.0, expected_batch_size=10)
    name = provenance.mechanism_name(dice_tf.DiceMechanism(**arguments))
    assert provenance.mechanism_name(dice_tf.DiceMechanism(**{**arguments, **part})) != name
    seeded = dice_tf.DiceMechanism(**arguments, noise_is_secret=False)
    assert provenance.mechanism_name(seeded) == name


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
