# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What takes long says so in a line, once, and not to those who asked for silence."""

import time

import keras
import numpy as np
import pytest

import dice_tf
from dice_tf.training import long_work

LAYERS = keras.layers
X, Y = np.ones((8, 4), "float32"), np.zeros(8, "int32")


@pytest.fixture
def everything_takes_long(monkeypatch):
    monkeypatch.setattr(long_work, "SECONDS", 0.0)


def compiled():
    model = keras.Sequential([keras.Input((4,)), LAYERS.Dense(3)], name="named")
    optimizer = dice_tf.DiceSGDOptimizer(
        0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def lines(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if "dice_tf:" in line]


def test_the_first_fit_says_what_it_does_and_the_second_has_nothing_to_say(
    everything_takes_long, capsys
):
    model = compiled()
    model.fit(X, Y, batch_size=4, verbose=2)
    checking, building = lines(capsys)
    assert "comparing the gradients of model 'named'" in checking
    assert "building the private step of model 'named', once" in building
    model.fit(X, Y, batch_size=4, verbose=2)
    assert lines(capsys) == []


def test_a_silent_fit_and_steps_outside_of_fit_say_nothing(everything_takes_long, capsys):
    model = compiled()
    model.fit(X, Y, batch_size=4, verbose=0)
    other = compiled()
    other.train_on_batch(X, Y)
    dice_tf.check_gradients(compiled(), (X, Y))
    assert lines(capsys) == []


def test_what_is_done_in_time_says_nothing(capsys, monkeypatch):
    monkeypatch.setattr(long_work, "SECONDS", 0.2)
    with long_work.said("dice_tf: short", True):
        pass
    with pytest.raises(ValueError), long_work.said("dice_tf: failed", True):
        raise ValueError
    with long_work.said("dice_tf: long", True):
        time.sleep(0.5)
    assert lines(capsys) == ["dice_tf: long"]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
