# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a private linear model on features that need no training, and so cost no privacy.

What it shows: a private model of Fashion-MNIST that is better than a small network, in minutes on
two cores. Scattering features (`scattering.py`) are fixed wavelets: nothing in them is learnt,
so only 39,700 weights get noise. Error feedback is spread over three steps, and examples are
drawn by random allocation, each exactly once per epoch.

    python examples/train_on_features.py
    python examples/train_on_features.py --epsilon=8
    python examples/train_on_features.py --dp_sgd                 no error feedback

What it needs: as train_image_classifier.py with fashion_mnist, and 3 GB of memory. The features
take most of the time, and are kept in --output_dir.

Thresholds, learning rate and the rest were chosen on held-out training images, among the first
draws of a search by compare.py (10 epochs, free batch, epsilon 2.7). On private data such a
search costs privacy, too.
"""

import pathlib
import time

from absl import app, flags, logging
import comparison_tasks

import dice_tf


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
    folder = pathlib.Path(flag_values.output_dir)
    options = comparison_tasks.Options(flag_values.data_dir, str(folder), flag_values.quick)
    task = comparison_tasks.fashion_mnist(options)
    data = task.train_data(for_search=False)
    plan = make_plan(flag_values, len(task.x))
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
    model = comparison_tasks.make_model(task)
    model.compile(optimizer, task.loss, metrics=["accuracy"])
    start = time.monotonic()
    model.fit(plan.dataset(*data), epochs=plan.epochs, callbacks=[plan.callback()], verbose=2)
    accuracy = model.evaluate(*task.test, batch_size=1000, verbose=0, return_dict=True)["accuracy"]
    path = folder / "privacy_statement.txt"
    path.write_text(plan.statement(model), encoding="utf-8")
    print(
        f"\nAccuracy on {len(task.test[0])} test images: {accuracy:.4f} at epsilon "
        f"{plan.epsilon():.3f}, delta {plan.delta:g} ({time.monotonic() - start:.0f} s of "
        f"training). The full statement is in {path}",
        flush=True,
    )
    return accuracy


def define_flags(flag_values):
    """Defines the flags of this script.

    Args:
        flag_values: `absl.flags.FlagValues` to define them in.
    """
    options = {"flag_values": flag_values}
    flags.DEFINE_float("epsilon", 2.7, "Privacy budget.", **options)
    flags.DEFINE_float("delta", 1e-5, "Below 1 / number of training images.", **options)
    flags.DEFINE_bool("dp_sgd", False, "No error feedback, the same threshold.", **options)
    flags.DEFINE_integer("batch_size", 512, "Expected batch size.", **options)
    flags.DEFINE_integer("epochs", 10, "Number of epochs.", **options)
    flags.DEFINE_integer("feedback_steps", 3, "Steps s of error feedback.", **options)
    flags.DEFINE_float("share", 0.3, "C1 / (C1 + C2).", **options)
    flags.DEFINE_float("clip", 0.2, "C1 + C2.", **options)
    flags.DEFINE_float("step_length", 77.0, "Learning rate * (C1 + C2).", **options)
    flags.DEFINE_float("averaged_part", 0.05, "Part of the steps that is averaged.", **options)
    flags.DEFINE_integer(
        "seed", None, "For tests: who knows the seed can remove the noise.", **options
    )
    flags.DEFINE_bool("quick", False, "Few images, to see it work.", **options)
    flags.DEFINE_string("data_dir", None, "Folder of TFDS; default: that of TFDS.", **options)
    flags.DEFINE_string("output_dir", "out/features", "Folder of features, statement.", **options)


def main(argv):
    """Runs the script with the flags of the command line."""
    del argv
    logging.set_verbosity(logging.WARNING)
    run(flags.FLAGS)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
