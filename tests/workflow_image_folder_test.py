# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""A folder of images, from files to a released model, with augmentation in both places.

As docs/your_data_on_disk.md has it: the paths are drawn, `map` decodes them; augmentation is
done in `map`, or by layers of the model.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dice_tf
from dice_tf import accounting
from dice_tf.ledger import provenance

N, HELD_OUT, B, EPOCHS, DELTA, SIZE = 160, 40, 40, 6, 5e-4, (8, 8, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A hundred images each of bright tops and bright bottoms, in a folder per class."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for label, name in enumerate(("bottom", "top")):
        (root / name).mkdir()
        for i in range((N + HELD_OUT) // 2):
            pixels = rng.integers(0, 60, (10, 9, 3))
            pixels[slice(0, 5) if label else slice(5, 10)] += 150
            encoded = tf.io.encode_png(pixels.astype(np.uint8))
            (root / name / f"{i:03}.png").write_bytes(encoded.numpy())
    return root


@pytest.fixture(scope="module")
def examples(folder):
    """Paths and classes, in an order that nothing in the images decides."""
    files = sorted(folder.glob("*/*.png"))
    names = sorted({file.parent.name for file in files})
    order = np.random.default_rng(1).permutation(len(files))
    paths = np.asarray([str(file) for file in files])[order]
    classes = np.asarray([names.index(file.parent.name) for file in files])[order]
    return paths, classes


def load(path):
    image = tf.io.decode_png(tf.io.read_file(path), channels=3)
    return tf.image.resize(image, SIZE[:2]) / 255.0


def decode(augment):
    def decode(paths, classes, *weights):
        images = tf.map_fn(
            lambda path: augment(load(path)), paths, fn_output_signature=tf.TensorSpec(SIZE)
        )
        return images, classes, *weights

    return decode


def flip(image):
    return tf.image.random_flip_left_right(image)


WAYS = {
    "in map": (flip, []),
    "in the model": (
        tf.identity,
        [
            keras.layers.RandomFlip("horizontal"),
            keras.layers.RandomTranslation(0.1, 0.1),
            keras.layers.RandomBrightness(0.05, value_range=(0, 1)),
        ],
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_folder_of_images_is_learned_within_the_budget(examples, way, tmp_path):
    keras.utils.set_random_seed(0)
    augment, layers = WAYS[way]
    paths, classes = examples
    sampling = dice_tf.CyclicPoissonSampling(num_examples=N, expected_batch_size=B, seed=0)
    noise_multiplier = accounting.calibrate_noise_multiplier(
        target_epsilon=8.0, delta=DELTA, sampling=sampling, steps=sampling.steps(EPOCHS)
    )
    data = sampling.dataset(paths[:N], classes[:N], planned_epochs=EPOCHS)
    data = data.map(decode(augment), num_parallel_calls=2)
    held_out = tf.data.Dataset.from_tensor_slices((paths[N:], classes[N:])).batch(HELD_OUT)
    model = keras.Sequential([
        keras.Input(SIZE),
        *layers,
        keras.layers.Conv2D(4, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(2, activation="softmax"),
    ])  # fmt: skip
    dice_tf.check_model(model)
    model.compile(
        dice_tf.DiceSGDOptimizer(
            0.5, momentum=0.5, l2_norm_clip=0.5, noise_multiplier=noise_multiplier,
            expected_batch_size=B, noise_seed=0,
        ),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )  # fmt: skip
    budget = dice_tf.EpsilonCallback(sampling, delta=DELTA, target_epsilon=8.0)
    history = model.fit(
        data, epochs=EPOCHS, verbose=0, callbacks=[budget],
        validation_data=held_out.map(decode(tf.identity)),
    ).history  # fmt: skip
    assert history["val_accuracy"][-1] > 0.9, history
    assert 7 < budget.epsilon() <= 8.0 and budget.accounted_steps() == sampling.steps(EPOCHS)
    assert "not cover" in budget.statement()

    model.save(tmp_path / "released.keras")
    loaded = keras.models.load_model(tmp_path / "released.keras")
    images, _ = next(iter(held_out.map(decode(tf.identity))))
    # Nothing is augmented any more.
    np.testing.assert_array_equal(
        loaded.predict(images, verbose=0), model.predict(images, verbose=0)
    )


def test_each_row_is_augmented_on_its_own_and_keeps_its_mark(examples):
    paths, classes = examples
    sampling = dice_tf.PoissonSampling(num_examples=N, expected_batch_size=B, seed=0)
    data = sampling.dataset(paths[:N], classes[:N])
    plain = {path: load(path).numpy() for path in paths[:N]}
    # The paths beside the images, to know which is which.
    both = data.map(lambda p, c, w: ({"p": p, "image": decode(flip)(p, c, w)[0]}, c, w))
    flipped = 0
    for x, _, w in both:
        assert int(provenance.count_marks(w)) == 1
        for path, image in zip(x["p"].numpy(), x["image"].numpy(), strict=True):
            original = plain[path.decode()]
            mirrored = not np.array_equal(image, original)
            np.testing.assert_array_equal(image, original[:, ::-1] if mirrored else original)
            flipped += mirrored
    assert 0.3 < flipped / (sampling.steps_per_epoch * len(w)) < 0.7


def test_the_directory_of_keras_costs_several_times_the_epsilon(folder, examples):
    paths, _ = examples
    stream = keras.utils.image_dataset_from_directory(
        folder, batch_size=B, image_size=SIZE[:2], verbose=False
    )
    sampling = dice_tf.ShuffledEpochs(num_examples=len(paths), expected_batch_size=B)
    mechanism = dice_tf.DiceMechanism(l2_norm_clip=0.5, noise_multiplier=4.0, expected_batch_size=B)
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(2)])
    model.compile(
        dice_tf.DiceSGDOptimizer(
            0.1, l2_norm_clip=0.5, noise_multiplier=4.0, expected_batch_size=B
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    budget = dice_tf.EpsilonCallback(sampling, delta=DELTA)
    model.fit(stream, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[budget])
    drawn = dice_tf.CyclicPoissonSampling(num_examples=len(paths), expected_batch_size=B)
    epsilon = accounting.compute_epsilon(mechanism, drawn, drawn.steps(EPOCHS), DELTA)
    assert budget.epsilon() > 1.5 * epsilon


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
