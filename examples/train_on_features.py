# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a private linear model on features that need no training, and so cost no privacy.

What it shows: a private model of Fashion-MNIST that is better than a small network, in minutes on
two cores. The features are random convolutions (`convolution_features.py`): nothing in them is
learnt, so only 47,050 weights get noise. Examples are drawn by random allocation, each exactly
once per epoch.

    python examples/train_on_features.py
    python examples/train_on_features.py --epsilon=8
    python examples/train_on_features.py --dp_sgd                 no error feedback

What it needs: as train_image_classifier.py with fashion_mnist, and 6 GB of memory.

Features, thresholds, learning rate and the rest were chosen on 10,000 held-out training images,
at epsilon 2.7. On private data such a search costs privacy, too.
"""

import pathlib
import time

from absl import app, flags, logging
import convolution_features
import image_datasets
import keras
import numpy as np

import dice_tf

# A bias that learns more slowly: features have norm 1.
_CONSTANT = 0.1


def make_plan(flag_values, num_examples):
    """Returns the `dice_tf.PrivacyPlan` of the flags.

    Args:
        flag_values: Parsed flags, see `define_flags`.
        num_examples: Int.
    """
    s = 0 if flag_values.dp_sgd else flag_values.feedback_steps
    sampling = dice_tf.RandomAllocation(
        num_examples, flag_values.batch_size, num_groups=s + 1, seed=flag_values.seed
    )
    return dice_tf.PrivacyPlan(
        sampling=sampling,
        epochs=flag_values.epochs,
        target_epsilon=flag_values.epsilon,
        delta=flag_values.delta,
        feedback_steps=s,
        error_norm_clip_ratio=1 / flag_values.share - 1 if s else 0.0,
    )


def run(flag_values):
    """Trains, and reports the accuracy on the test images and the guarantee.

    Args:
        flag_values: Parsed flags, see `define_flags`.

    Returns:
        Float, the accuracy on the test images.
    """
    images = image_datasets.load_images("fashion_mnist", flag_values.data_dir)
    if flag_values.quick:
        images = images._replace(x_train=images.x_train[:12000], y_train=images.y_train[:12000])
        images = images._replace(x_test=images.x_test[:2000], y_test=images.y_test[:2000])
    start = time.monotonic()
    x, test_x = (_inputs(images) for images in (images.x_train, images.x_test))
    print(f"Features of {len(x)} images: {time.monotonic() - start:.0f} s.", flush=True)
    plan = make_plan(flag_values, len(x))
    print(f"\n{plan}\n", flush=True)
    share = 1.0 if flag_values.dp_sgd else flag_values.share
    averaged_steps = max(2.0, flag_values.averaged_part * plan.steps)
    optimizer = dice_tf.DiceSGDOptimizer(
        # All steps together pass on so much of a clipped gradient, whatever the thresholds are.
        learning_rate=flag_values.step_length / flag_values.clip,
        # The mean of the last iterates has less noise than the last one.
        use_ema=True,
        ema_momentum=1 - 1 / averaged_steps,
        l2_norm_clip=share * flag_values.clip,
        plan=plan,
        noise_seed=flag_values.seed,
    )
    # From zero: convex problems need no random start. The constant is among the inputs.
    layer = keras.layers.Dense(images.num_classes, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input(x.shape[1:]), layer])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    start = time.monotonic()
    model.fit(
        plan.dataset(x, images.y_train), epochs=plan.epochs, callbacks=[plan.callback()], verbose=2
    )
    accuracy = model.evaluate(test_x, images.y_test, verbose=0, return_dict=True)["accuracy"]
    path = pathlib.Path(flag_values.output_dir) / "privacy_statement.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(plan.statement(model), encoding="utf-8")
    print(
        f"\nAccuracy on {len(test_x)} test images: {accuracy:.4f} at epsilon "
        f"{plan.epsilon():.3f}, delta {plan.delta:g} ({time.monotonic() - start:.0f} s of "
        f"training). The full statement is in {path}",
        flush=True,
    )
    return accuracy


def _inputs(images):
    features = convolution_features.features(images[..., 0])
    return np.concatenate([features, np.full((len(features), 1), _CONSTANT, np.float32)], 1)


def define_flags(flag_values):
    """Defines the flags of this script.

    Args:
        flag_values: `absl.flags.FlagValues` to define them in.
    """
    options = {"flag_values": flag_values}
    flags.DEFINE_float("epsilon", 2.7, "Privacy budget.", **options)
    flags.DEFINE_float("delta", 1e-5, "Below 1 / number of training images.", **options)
    flags.DEFINE_bool("dp_sgd", False, "No error feedback, the same threshold.", **options)
    flags.DEFINE_integer("batch_size", 4096, "Expected batch size.", **options)
    flags.DEFINE_integer("epochs", 25, "Number of epochs.", **options)
    flags.DEFINE_integer("feedback_steps", 1, "Steps s of error feedback.", **options)
    flags.DEFINE_float("share", 0.5, "C1 / (C1 + C2).", **options)
    flags.DEFINE_float("clip", 0.3, "C1 + C2.", **options)
    flags.DEFINE_float("step_length", 130.0, "Learning rate * (C1 + C2).", **options)
    flags.DEFINE_float("averaged_part", 0.1, "Part of the steps that is averaged.", **options)
    flags.DEFINE_integer(
        "seed", None, "For tests: who knows the seed can remove the noise.", **options
    )
    flags.DEFINE_bool("quick", False, "Few images, to see it work.", **options)
    flags.DEFINE_string("data_dir", None, "Folder of TFDS; default: that of TFDS.", **options)
    flags.DEFINE_string("output_dir", "out/features", "Folder of the privacy statement.", **options)


def main(argv):
    """Runs the script with the flags of the command line."""
    del argv
    logging.set_verbosity(logging.WARNING)
    run(flags.FLAGS)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
