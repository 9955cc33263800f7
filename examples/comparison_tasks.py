# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What compare.py trains: linear models, where clipping and noise decide alone, and a network."""

from collections.abc import Callable
import functools
from typing import NamedTuple

import comparison_features
import image_datasets
import image_models
import keras
import numpy as np
import stacked_trainer
import text_datasets

# Of the task with rare classes: shirts are the hardest class of Fashion-MNIST.
_RARE_CLASSES, _RARE_PART = (2, 5, 6), 0.05
# As many as are encoded in some minutes.
_TRAINING_TEXTS, _TEST_TEXTS = 40_000, 10_000


class Task(NamedTuple):
    """A problem with its data and the ranges that a search begins with.

    Attributes:
        x: Inputs to train on, of a linear model float32; the last of them are held out from
            searches.
        y: Targets.
        held_out: Int, how many.
        test: Pair of inputs and targets, for what the search chose.
        source: Text, where the data comes from.
        outputs: Int, number of outputs of the model.
        make_model: Function without arguments that returns the Keras model, with logits as outputs.
        errors: Gradients of the loss by the outputs, for `stacked_trainer.train`; `None` if the
            model is not linear, so that only the package can train it.
        loss: The same loss, for `compile`.
        example_scores: Function of outputs `[rows, models, outputs]` and targets to scores
            `[rows, models]`, whose mean over the rows is what counts; larger is better.
        score: Text for tables and plots.
        batch_sizes: Tuple of ints, among which a free search draws.
        delta: Float.
        clips: Pair of floats, range of C1 + C2.
        step_lengths: Pair of floats, range of learning rate * (C1 + C2) / (1 - momentum).
    """

    x: np.ndarray
    y: np.ndarray
    held_out: int
    test: tuple
    source: str
    outputs: int
    make_model: Callable
    errors: Callable | None
    loss: Callable
    example_scores: Callable
    score: str
    batch_sizes: tuple
    delta: float
    clips: tuple
    step_lengths: tuple

    @property
    def linear(self):
        """Whether `stacked_trainer.train` can train the model."""
        return self.errors is not None

    def train_data(self, for_search):
        """Returns inputs and targets: without those held out, or all."""
        end = len(self.x) - self.held_out if for_search else len(self.x)
        return self.x[:end], self.y[:end]

    def held_out_data(self):
        """Returns inputs and targets to choose by."""
        return self.x[-self.held_out :], self.y[-self.held_out :]


def digits(options):
    """Softmax regression on the pixels of scikit-learn's digits.

    Args:
        options: `Options`.
    """
    pixels = lambda images: images.reshape(len(images), -1).astype(np.float32) - 127.5
    data = image_datasets.load_images("digits", options.data_dir)
    return _softmax_task(
        *_image_arrays(data, lambda images: comparison_features.normed(pixels(images))),
        source=data.source,
        held_out=round(0.2 * len(data.x_train)),
        batch_sizes=(48, 96, 192),
        delta=1e-4,
    )


def mnist_5000(options):
    """Softmax regression on scattering features of 5,000 digits of MNIST.

    Args:
        options: `Options`.
    """
    arrays, source = _featured_images("mnist_5000", comparison_features.scattered, options)
    return _softmax_task(
        *arrays, source=source, held_out=800, batch_sizes=(64, 128, 256), delta=2e-5
    )


def fashion_mnist(options):
    """Softmax regression on scattering features of Fashion-MNIST.

    Args:
        options: `Options`.
    """
    return _fashion_mnist(comparison_features.scattered, options)


def fashion_mnist_convolutions(options):
    """Softmax regression on the features of train_on_features.py.

    Args:
        options: `Options`.
    """
    return _fashion_mnist(comparison_features.convolved, options)


def fashion_mnist_rare(options):
    """The same with three classes cut to a twentieth; what counts is accuracy class by class.

    Args:
        options: `Options`.
    """
    (x, y, test_x, test_y), source = _featured_images(
        "fashion_mnist", comparison_features.scattered, options
    )
    random = np.random.default_rng(0)
    kept = ~np.isin(y, _RARE_CLASSES) | (random.random(len(y)) < _RARE_PART)
    sizes = (64, 128) if options.quick else (512, 1024, 2048)
    held_out = 200 if options.quick else 7_000
    task = _softmax_task(
        x[kept], y[kept], test_x, test_y,
        source=f"{source}, classes {_RARE_CLASSES} cut to {_RARE_PART:.0%} (seed 0)",
        held_out=held_out, batch_sizes=sizes, delta=1e-5,
    )  # fmt: skip
    return task._replace(example_scores=_correct_by_class, score="mean accuracy of the classes")


def fashion_mnist_cnn(options):
    """The small network of train_image_classifier.py on the pixels of Fashion-MNIST.

    Args:
        options: `Options`.
    """
    data = _load_images("fashion_mnist", options)
    task = _softmax_task(
        data.x_train, data.y_train, data.x_test, data.y_test,
        source=data.source,
        held_out=200 if options.quick else 10_000,
        batch_sizes=(64, 128) if options.quick else (256, 512, 1024),
        delta=1e-5,
    )  # fmt: skip
    shape = data.x_train.shape[1:]
    return task._replace(
        make_model=functools.partial(
            image_models.build_model, "fashion_mnist", shape, data.num_classes
        ),
        errors=None,
        clips=(0.03, 1.0),
        step_lengths=(1.5, 24.0),
    )


def definitions(options):
    """Softmax regression on embeddings of WordNet's definitions: which kind of thing is defined?

    The unit is one definition. Some words are in several.

    Args:
        options: `Options`.
    """
    texts = text_datasets.load_definitions(options.wordnet_dir)
    pairs = texts.train + texts.test
    count, tests = (1000, 200) if options.quick else (_TRAINING_TEXTS, _TEST_TEXTS)
    pairs = pairs[:-tests][:count] + pairs[-tests:]
    x = comparison_features.encoded([text for text, _ in pairs], options)
    y = np.array([kind for _, kind in pairs])
    return _softmax_task(
        x[:-tests], y[:-tests], x[-tests:], y[-tests:],
        source=f"{texts.source}, by {comparison_features.encoder(options)}",
        held_out=(len(x) - tests) // 5,
        batch_sizes=(64, 128) if options.quick else (256, 512, 1024, 2048),
        delta=1e-4 if options.quick else 1e-5,
    )  # fmt: skip


def heavy_tails(options):
    """Least squares with skewed, heavy-tailed noise on the targets; synthetic.

    Targets are `w * x + noise` with 300 normal features and Lomax noise of shape 2.5, less its
    mean: few large errors upwards balance many small ones downwards. Clipped gradients see
    the many, so their fixed point is not the mean. Test targets have no noise: what
    counts is the distance to the conditional mean.

    Args:
        options: `Options`.
    """
    # So many that a threshold above the tails would cost too much noise: made for the question.
    features = 300
    random = np.random.default_rng(0)
    weights = random.normal(size=features) / np.sqrt(features)

    def examples(count, noisy):
        x = random.normal(size=(count, features))
        noise = random.pareto(2.5, size=count) - 1 / 1.5 if noisy else 0.0
        y = (x @ weights + noise).astype(np.float32)
        return np.concatenate([x, np.ones((count, 1))], 1).astype(np.float32), y

    count = 1_000 if options.quick else 24_000
    # What a practitioner has: targets with noise.
    x, y = examples(count + count // 4, noisy=True)
    return Task(
        x=x,
        y=y,
        held_out=count // 4,
        test=examples(5_000, noisy=False),
        source="synthetic (seed 0), Lomax noise of shape 2.5 on the targets",
        outputs=1,
        make_model=functools.partial(linear_model, x.shape[1], 1),
        errors=stacked_trainer.squared_errors,
        loss=keras.losses.MeanSquaredError(),
        example_scores=_explained,
        score="explained variance of noise-free test targets",
        batch_sizes=(83, 166) if options.quick else (125, 250, 500, 1000),
        delta=1e-4 if options.quick else 1e-5,
        clips=(4.0, 64.0),
        step_lengths=(0.25, 4.0),
    )


class Options(NamedTuple):
    """What data sets are read with.

    Attributes:
        data_dir: Folder of TFDS, or `None`, see `image_datasets.load_images`.
        cache_dir: Folder for computed features, or `None` to compute them each time.
        quick: Whether to take few examples, to see it work.
        wordnet_dir: Folder of WordNet's database files.
    """

    data_dir: str | None = None
    cache_dir: str | None = None
    quick: bool = False
    wordnet_dir: str = "/usr/share/wordnet"


TASKS = {
    "digits": digits,
    "heavy_tails": heavy_tails,
    "mnist_5000": mnist_5000,
    "fashion_mnist": fashion_mnist,
    "fashion_mnist_convolutions": fashion_mnist_convolutions,
    "fashion_mnist_rare": fashion_mnist_rare,
    "fashion_mnist_cnn": fashion_mnist_cnn,
    "definitions": definitions,
}


def linear_model(inputs, outputs):
    """Returns a linear model in Keras, which starts from zero.

    Args:
        inputs: Int, number of inputs, the constant among them.
        outputs: Int.
    """
    # Convex problems need no random start.
    layer = keras.layers.Dense(outputs, use_bias=False, kernel_initializer="zeros")
    return keras.Sequential([keras.Input((inputs,)), layer])


def _fashion_mnist(features, options):
    arrays, source = _featured_images("fashion_mnist", features, options)
    sizes = (64, 128) if options.quick else (512, 1024, 2048)
    held_out = 200 if options.quick else 10_000
    return _softmax_task(*arrays, source=source, held_out=held_out, batch_sizes=sizes, delta=1e-5)


def _softmax_task(x, y, test_x, test_y, *, source, held_out, batch_sizes, delta):
    outputs = int(y.max()) + 1
    return Task(
        x=x,
        y=y,
        held_out=held_out,
        test=(test_x, test_y),
        source=source,
        outputs=outputs,
        make_model=functools.partial(linear_model, x.shape[1], outputs),
        errors=stacked_trainer.softmax_errors,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        example_scores=_correct,
        score="accuracy",
        batch_sizes=batch_sizes,
        delta=delta,
        # Features have norm 1, so the norm of a gradient is at most 1.4.
        clips=(0.05, 0.8),
        step_lengths=(8.0, 128.0),
    )


def _correct(outputs, targets):
    return (outputs.argmax(2) == targets[:, np.newaxis]).astype(np.float32)


def _correct_by_class(outputs, targets):
    counts = np.bincount(targets)
    share = len(targets) / (counts.astype(bool).sum() * np.maximum(counts, 1))
    return _correct(outputs, targets) * share[targets, np.newaxis].astype(np.float32)


def _explained(outputs, targets):
    return 1 - (outputs[:, :, 0] - targets[:, np.newaxis]) ** 2 / targets.var()


def _load_images(name, options):
    data = image_datasets.load_images(name, options.data_dir)
    if not options.quick:
        return data
    return data._replace(x_train=data.x_train[:1200], y_train=data.y_train[:1200],
                         x_test=data.x_test[:200], y_test=data.y_test[:200])  # fmt: skip


def _featured_images(name, features, options):
    data = _load_images(name, options)
    features = functools.partial(features, options=options, name=name)
    return _image_arrays(data, features), data.source


def _image_arrays(data, to_features):
    x, test_x = (
        comparison_features.with_constant(to_features(images))
        for images in (data.x_train, data.x_test)
    )
    return x, data.y_train, test_x, data.y_test
