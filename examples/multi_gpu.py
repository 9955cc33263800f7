# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Private training on all GPUs of a machine, with throughput and epsilon.

What it shows: `tf.distribute.MirroredStrategy` shares every batch out among the GPUs there
are. Nothing that enters epsilon depends on their number: `--batch_size` is the batch over
all of them, and noise is added once.

    python examples/multi_gpu.py --dataset=cifar10
    python examples/multi_gpu.py --logical_cpus=2          a dry run without GPUs

The dry run splits the CPU into logical devices. It runs the code of several GPUs, and is
no faster than one device: they share the same cores.

What it needs: TensorFlow with GPU support (`pip install tensorflow[and-cuda]`) for the
first, the extra `examples` of the package and no network for the second (digits). With one
GPU it trains on that, without any on the CPU. How long it takes: the dry run half a minute
on two cores. docs/scaling.md and docs/gpu.md say more.
"""

import time

from absl import app, flags, logging
import image_classifier_flags
import image_datasets
import image_models
import keras
import private_run
import tensorflow as tf

import dice_tf


class Clock(keras.callbacks.Callback):
    """Notes when epochs begin and end. The first one also traces the graphs."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        """Starts the clock."""
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        """Stops it."""
        self.seconds.append(time.perf_counter() - self._start)


def make_strategy(logical_cpus):
    """Returns a `tf.distribute.MirroredStrategy`. To be called before anything else.

    Args:
        logical_cpus: Int: 0 for all GPUs, or the number of devices to split the CPU into.
    """
    if not logical_cpus:
        return tf.distribute.MirroredStrategy()
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * logical_cpus,
    )
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(logical_cpus)])


def make_plan(settings, num_examples):
    """Returns the `dice_tf.PrivacyPlan` of a run, whatever the number of devices.

    Args:
        settings: Parsed flags.
        num_examples: Int, number of training images.
    """
    defaults = image_classifier_flags.DEFAULTS[settings.dataset]
    return dice_tf.PrivacyPlan(
        num_examples=num_examples,
        batch_size=settings.batch_size or defaults.batch_size,
        epochs=settings.epochs or defaults.epochs,
        target_epsilon=settings.epsilon,
        delta=defaults.delta,
        accountant=settings.accountant,
        # The defaults were chosen with one step of feedback.
        feedback_steps=1,
    )


def run(settings):
    """Trains on all devices and reports.

    Args:
        settings: Parsed flags.

    Returns:
        The Keras `History`.
    """
    strategy = make_strategy(settings.logical_cpus)
    replicas = strategy.num_replicas_in_sync
    data = image_datasets.load_images(settings.dataset, settings.data_dir)
    plan = make_plan(settings, len(data.x_train))
    defaults = image_classifier_flags.DEFAULTS[settings.dataset]
    # What training keeps is made in the scope, so that each device has its copy.
    with strategy.scope():
        model = image_models.build_model(settings.dataset, data.x_train.shape[1:], data.num_classes)
        optimizer = dice_tf.DiceSGDOptimizer(
            defaults.learning_rate,
            momentum=defaults.momentum,
            l2_norm_clip=defaults.l2_norm_clip,
            plan=plan,
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
        batches = plan.dataset(data.x_train, data.y_train)

    batch = plan.batch_size
    print(f"{replicas} device(s): {', '.join(strategy.extended.worker_devices)}")
    print(f"Expected batch: {batch} images, {batch / replicas:g} on each device.")
    print(f"\n{plan}\n", flush=True)

    budget, clock = plan.callback(), Clock()
    history = model.fit(batches, epochs=plan.epochs, callbacks=[budget, clock], verbose=2)
    evaluated = model.evaluate(data.x_test, data.y_test, batch_size=512, verbose=0)
    print(f"Accuracy on {len(data.x_test)} test images: {evaluated[1]:.4f}")
    seconds = clock.seconds[1:] or clock.seconds
    rate = batch * plan.sampling.steps_per_epoch * len(seconds) / sum(seconds)
    warm = "" if len(clock.seconds) > 1 else ", tracing included"
    print(f"Throughput: {rate:.0f} images per second on {replicas} device(s){warm}")
    steps = budget.accounted_steps()
    print(f"epsilon: {budget.epsilon()} at delta={plan.delta} after {steps} steps")
    return history


def define_flags(flag_values):
    """Defines the flags of this script.

    Args:
        flag_values: `absl.flags.FlagValues` to define them in.
    """
    options = {"flag_values": flag_values}
    names = list(image_classifier_flags.DEFAULTS)
    flags.DEFINE_enum("dataset", "digits", names, "Data set.", **options)
    flags.DEFINE_float("epsilon", 8.0, "Privacy budget, from which the noise follows.", **options)
    private_run.define_accountant(flag_values)
    for name, text in (
        ("batch_size", "Expected batch size over all devices."),
        ("epochs", "Number of epochs."),
    ):
        text += " Default: that of train_image_classifier.py for the data set."
        flags.DEFINE_integer(name, None, text, lower_bound=1, **options)
    flags.DEFINE_integer(
        "logical_cpus",
        0,
        "Instead of GPUs, this many logical devices of the CPU.",
        lower_bound=0,
        **options,
    )
    flags.DEFINE_string("data_dir", None, "Folder of prepared TFDS data sets.", **options)


def main(argv):
    """Runs the script with the flags of the command line."""
    del argv
    logging.set_verbosity(logging.WARNING)
    run(flags.FLAGS)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
