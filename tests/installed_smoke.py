# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains with an installed package, and nothing of this tree: run by `make test-dist`."""

import importlib.metadata
import importlib.resources
import pathlib
import subprocess
import sys
import sysconfig
import tempfile

import keras
import numpy as np

import dice_tf


def main():
    """Raises if something is missing or wrong."""
    package = pathlib.Path(dice_tf.__file__).resolve().parent
    assert package.parent == pathlib.Path(sysconfig.get_path("purelib")).resolve(), package
    assert importlib.metadata.version("dice-tf") == dice_tf.__version__
    assert importlib.resources.files("dice_tf").joinpath("py.typed").is_file()

    random = np.random.default_rng(0)
    x = random.normal(size=(400, 5)).astype("float32")
    y = (x.sum(axis=1) > 0).astype("int32")
    sampling = dice_tf.CyclicPoissonSampling(num_examples=400, expected_batch_size=40)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
    model.compile(
        dice_tf.DiceSGDOptimizer(
            0.5, l2_norm_clip=1.0, noise_multiplier=2.0, expected_batch_size=40
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    budget = dice_tf.EpsilonCallback(sampling, delta=1e-3)
    model.fit(sampling.dataset(x, y, planned_epochs=3), epochs=3, verbose=0, callbacks=[budget])
    expected = dice_tf.accounting.compute_epsilon(
        model.optimizer.mechanism, sampling, sampling.steps(3), delta=1e-3
    )
    assert budget.epsilon() == expected > 0
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model.keras")
        loaded = keras.models.load_model(f"{folder}/model.keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    command = [sys.executable, "-m", "dice_tf.accounting", "--num_examples=400", "--steps=30",
               "--batch_size=40", "--noise_multiplier=2", "--delta=1e-3"]  # fmt: skip
    statement = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"{expected:.3f}" in statement, statement
    _, accuracy = model.evaluate(x, y, verbose=0)
    print(
        f"dice_tf {dice_tf.__version__} in {package}: epsilon {expected:.4f}, "
        f"accuracy {accuracy:.3f}. It works."
    )


if __name__ == "__main__":
    main()
