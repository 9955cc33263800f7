# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains an image classifier with differential privacy, from data set to statement.

What it shows: a stock Keras model and loss, `compile` with a private optimizer, `fit` on
Poisson-sampled batches, epsilon in the progress bar, noise calibrated to a privacy
budget, and a statement of the guarantee that results.

    python examples/train_image_classifier.py
    python examples/train_image_classifier.py --dataset=fashion_mnist
    python examples/train_image_classifier.py --optimizer=dp_sgd --epsilon=4
    python examples/train_image_classifier.py --noise_multiplier=2 --epochs=10

What it needs: for `digits`, the default, the extra `examples` of the package and no
network. `fashion_mnist` reads the files of Debian's package dataset-fashion-mnist if it
is installed; otherwise it, `mnist`, `cifar10` and `cifar100` are downloaded by TFDS.

How long it takes on two cores: DIGITS_TIME for digits, FASHION_TIME for Fashion-MNIST.

The hyperparameters in `DEFAULTS` were chosen by accuracy on held-out training images
(`--validation_fraction`), not on the test images. These data sets are public. On private
data such a search costs privacy too, and no epsilon printed here includes it.

With --output_dir it writes training.csv (one row per epoch), training.png and
privacy_statement.txt there.
"""

import pathlib
import time
from typing import NamedTuple

from absl import app, flags
import image_datasets
import image_models
import keras
import plots

import dice_tf
from dice_tf import accounting

# Every private optimizer by the name of its flag. DP-SGD is DiceSGD without feedback.
PRIVATE_OPTIMIZERS = {
    "dice_sgd": dice_tf.DiceSGDOptimizer,
    "dp_sgd": dice_tf.DiceSGDOptimizer,
}
WITHOUT_FEEDBACK = ("dp_sgd",)
NON_PRIVATE = "sgd"
# Clipping makes gradients short, so that private learning rates are far too long for SGD.
NON_PRIVATE_LEARNING_RATE = 0.1

SAMPLINGS = ("cyclic", "poisson", "shuffled")


class Defaults(NamedTuple):
    """Values of the flags that depend on the data set."""

    epsilon: float
    delta: float
    l2_norm_clip: float
    batch_size: int
    epochs: int
    learning_rate: float
    momentum: float


DEFAULTS = {
    "digits": Defaults(8.0, 1e-4, 0.1, 256, 40, 2.0, 0.9),
    "mnist": Defaults(2.7, 1e-5, 0.1, 2048, 20, 2.0, 0.9),
    "fashion_mnist": Defaults(2.7, 1e-5, 0.1, 2048, 20, 2.0, 0.9),
    "cifar10": Defaults(7.5, 1e-5, 0.1, 2048, 30, 1.0, 0.9),
    "cifar100": Defaults(7.5, 1e-5, 0.1, 2048, 30, 1.0, 0.9),
}


class Plan(NamedTuple):
    """Everything that decides how a private run trains.

    Attributes:
        sampling: How batches are drawn.
        optimizer: The private optimizer.
        steps: Int, number of optimizer steps.
        delta: Float.
        target_epsilon: Float, or `None` if the noise was given.
    """

    sampling: dice_tf.PoissonSampling | dice_tf.CyclicPoissonSampling | dice_tf.ShuffledEpochs
    optimizer: keras.optimizers.Optimizer
    steps: int
    delta: float
    target_epsilon: float | None


def make_sampling(flag_values, num_examples):
    """Returns how batches are drawn, as the flags say.

    Args:
        flag_values: Parsed flags.
        num_examples: Int, number of training images.
    """
    batch_size, seed = _value(flag_values, "batch_size"), flag_values.seed
    if flag_values.sampling == "cyclic":
        return dice_tf.CyclicPoissonSampling(
            num_examples, batch_size, num_groups=flag_values.num_groups, seed=seed
        )
    cls = {"poisson": dice_tf.PoissonSampling, "shuffled": dice_tf.ShuffledEpochs}
    return cls[flag_values.sampling](num_examples, batch_size, seed=seed)


def make_plan(flag_values, num_examples):
    """Returns the sampling and the optimizer, with noise for the budget asked for.

    Args:
        flag_values: Parsed flags.
        num_examples: Int, number of training images.

    Returns:
        `Plan`.
    """
    sampling = make_sampling(flag_values, num_examples)
    steps = sampling.steps(_value(flag_values, "epochs"))
    delta = _value(flag_values, "delta")
    l2_norm_clip, error_norm_clip = _thresholds(flag_values)
    noise_multiplier, target_epsilon = flag_values.noise_multiplier, None
    if noise_multiplier is None:
        target_epsilon = _value(flag_values, "epsilon")
        noise_multiplier = accounting.calibrate_noise_multiplier(
            target_epsilon,
            delta,
            sampling,
            steps,
            l2_norm_clip=l2_norm_clip,
            error_norm_clip=error_norm_clip,
        )
    optimizer = PRIVATE_OPTIMIZERS[flag_values.optimizer](
        learning_rate=_value(flag_values, "learning_rate"),
        momentum=_value(flag_values, "momentum"),
        l2_norm_clip=l2_norm_clip,
        error_norm_clip=error_norm_clip,
        noise_multiplier=noise_multiplier,
        expected_batch_size=sampling.expected_batch_size,
        noise_seed=flag_values.seed,
    )
    return Plan(sampling, optimizer, steps, delta, target_epsilon)


def privacy_parameters(plan):
    """Returns every number that enters epsilon, and epsilon after the whole run.

    Args:
        plan: `Plan`.

    Returns:
        Dict from name to value.
    """
    mechanism, sampling = plan.optimizer.mechanism, plan.sampling
    guarantee = accounting.guarantee(mechanism, sampling, plan.steps, plan.delta)
    return {
        "num_examples": sampling.num_examples,
        "expected_batch_size": sampling.expected_batch_size,
        "sampling": type(sampling).__name__,
        "num_groups": sampling.num_groups,
        "sampling_probability": sampling.sampling_probability,
        "steps": plan.steps,
        "rounds": sampling.rounds(plan.steps),
        "l2_norm_clip": mechanism.l2_norm_clip,
        "error_norm_clip": mechanism.error_norm_clip,
        "bound_residuals": mechanism.bound_residuals,
        "noise_multiplier": mechanism.noise_multiplier,
        "noise_stddev": mechanism.noise_stddev,
        "delta": plan.delta,
        "neighbouring_relation": guarantee.neighbouring_relation,
        "accountant": guarantee.accountant,
        "epsilon": guarantee.epsilon,
    }


def train_privately(flag_values, data, model):
    """Trains `model` with a private optimizer, and reports what that guarantees.

    Args:
        flag_values: Parsed flags.
        data: `image_datasets.ImageData`.
        model: `keras.Model`.

    Returns:
        The Keras `History`.
    """
    plan = make_plan(flag_values, len(data.x_train))
    print("\nPrivacy parameters:")
    for name, value in privacy_parameters(plan).items():
        print(f"  {name}: {value}")
    if flag_values.seed is not None:
        print(f"--seed={flag_values.seed} fixes the noise: private only while nobody knows it.")
    print(flush=True)

    epochs = _value(flag_values, "epochs")
    budget = dice_tf.EpsilonCallback(
        plan.sampling, plan.delta, target_epsilon=plan.target_epsilon
    )
    _compile(model, plan.optimizer)
    history = model.fit(
        plan.sampling.dataset(data.x_train, data.y_train, epochs=epochs),
        epochs=epochs,
        validation_data=(data.x_test, data.y_test),
        callbacks=[budget, *_csv_logger(flag_values)],
    )
    mechanism, steps = plan.optimizer.mechanism, budget.accounted_steps()
    print(f"\n{accounting.guarantee(mechanism, plan.sampling, steps, plan.delta)}.")
    if flag_values.output_dir is not None:
        path = pathlib.Path(flag_values.output_dir) / "privacy_statement.txt"
        statement = accounting.privacy_statement(mechanism, plan.sampling, steps, plan.delta)
        path.write_text(statement, encoding="utf-8")
        print(f"The full statement is in {path}")
        _plot(flag_values, history, plan.sampling.steps_per_epoch, plan.delta)
    return history


def train_without_privacy(flag_values, data, model):
    """Trains `model` with plain SGD, as the baseline.

    Args:
        flag_values: Parsed flags.
        data: `image_datasets.ImageData`.
        model: `keras.Model`.

    Returns:
        The Keras `History`.
    """
    print("\n*** --optimizer=sgd trains WITHOUT privacy: epsilon is infinite. ***\n", flush=True)
    learning_rate = flag_values.learning_rate or NON_PRIVATE_LEARNING_RATE
    batch_size = _value(flag_values, "batch_size")
    _compile(model, keras.optimizers.SGD(learning_rate, momentum=_value(flag_values, "momentum")))
    history = model.fit(
        data.x_train,
        data.y_train,
        batch_size=batch_size,
        epochs=_value(flag_values, "epochs"),
        validation_data=(data.x_test, data.y_test),
        callbacks=_csv_logger(flag_values),
    )
    print("\n*** This model was trained WITHOUT privacy: epsilon is infinite. ***")
    if flag_values.output_dir is not None:
        _plot(flag_values, history, -(-len(data.x_train) // batch_size))
    return history


def run(flag_values):
    """Loads the data, trains and reports.

    Args:
        flag_values: Parsed flags, see `define_flags`.

    Returns:
        The Keras `History`.

    Raises:
        absl.app.UsageError: If flags contradict each other.
    """
    check_flags(flag_values)
    if flag_values.seed is not None:
        keras.utils.set_random_seed(flag_values.seed)
    if flag_values.output_dir is not None:
        pathlib.Path(flag_values.output_dir).mkdir(parents=True, exist_ok=True)
    data = image_datasets.load_images(flag_values.dataset, flag_values.data_dir)
    data = image_datasets.hold_out(data, flag_values.validation_fraction)
    print(f"Data: {data.source}; {len(data.x_train)} training images.")
    model = image_models.build_model(flag_values.dataset, data.x_train.shape[1:], data.num_classes)
    print(f"Model: {model.count_params()} weights in {len(model.weights)} variables.")

    private = flag_values.optimizer != NON_PRIVATE
    start = time.monotonic()
    history = (train_privately if private else train_without_privacy)(flag_values, data, model)
    images = "held-out training" if flag_values.validation_fraction else "test"
    print(
        f"Accuracy on {len(data.x_test)} {images} images: {history.history['val_accuracy'][-1]:.4f} "
        f"({time.monotonic() - start:.0f} s of training)."
    )
    return history


def check_flags(flag_values):
    """Refuses flags that contradict each other.

    Raises:
        absl.app.UsageError: Naming the flags and the remedy.
    """
    given = lambda name: getattr(flag_values, name) is not None
    if given("epsilon") and given("noise_multiplier"):
        raise app.UsageError(
            "--epsilon and --noise_multiplier exclude each other: the first one computes the noise, "
            f"the second one sets it. Received: --epsilon={flag_values.epsilon}, "
            f"--noise_multiplier={flag_values.noise_multiplier}. Leave one out."
        )
    if flag_values.optimizer in WITHOUT_FEEDBACK and flag_values.error_norm_clip:
        raise app.UsageError(
            f"--optimizer={flag_values.optimizer} has no error feedback. Received: "
            f"--error_norm_clip={flag_values.error_norm_clip}. Use --optimizer=dice_sgd."
        )
    if flag_values.optimizer == NON_PRIVATE:
        private = ("epsilon", "noise_multiplier", "delta", "l2_norm_clip", "error_norm_clip")
        extra = [f"--{name}" for name in private if given(name)]
        if extra:
            raise app.UsageError(
                f"--optimizer={NON_PRIVATE} is not private and takes no {', '.join(extra)}. "
                f"Use one of {tuple(PRIVATE_OPTIMIZERS)}."
            )


def define_flags(flag_values):
    """Defines the flags of this script.

    Args:
        flag_values: `absl.flags.FlagValues` to define them in.
    """
    options = {"flag_values": flag_values}
    flags.DEFINE_enum("dataset", "digits", list(DEFAULTS), "Data set.", **options)
    flags.DEFINE_enum(
        "optimizer",
        "dice_sgd",
        [*PRIVATE_OPTIMIZERS, NON_PRIVATE],
        f"dp_sgd clips without error feedback, {NON_PRIVATE} is not private.",
        **options,
    )
    for name, define, text in (
        ("epsilon", flags.DEFINE_float, "Privacy budget, from which the noise follows."),
        ("delta", flags.DEFINE_float, "Below 1 / number of training images."),
        ("l2_norm_clip", flags.DEFINE_float, "Clipping threshold C1 (dp_sgd: twice the default)."),
        ("batch_size", flags.DEFINE_integer, "Expected batch size."),
        ("epochs", flags.DEFINE_integer, "Number of epochs."),
        ("learning_rate", flags.DEFINE_float, "Learning rate."),
        ("momentum", flags.DEFINE_float, "Momentum."),
    ):
        define(name, None, f"{text} Default: depends on the data set, see DEFAULTS.", **options)
    flags.DEFINE_float(
        "noise_multiplier",
        None,
        "Instead of --epsilon: noise standard deviation on the sum of clipped gradients, "
        "divided by l2_norm_clip.",
        **options,
    )
    flags.DEFINE_float("error_norm_clip", None, "Threshold C2. Default: l2_norm_clip.", **options)
    flags.DEFINE_enum(
        "sampling",
        "cyclic",
        SAMPLINGS,
        "How batches are drawn: by Poisson sampling from groups that take turns, from all images, "
        "or each image once per epoch (which amplifies no privacy).",
        **options,
    )
    flags.DEFINE_integer("num_groups", 2, "Number of groups of cyclic sampling.", **options)
    flags.DEFINE_integer(
        "seed",
        None,
        "Makes a run reproducible. For tests: who knows the seed can remove the noise.",
        **options,
    )
    flags.DEFINE_float(
        "validation_fraction",
        0.0,
        "Holds out this part of the training images and evaluates on it instead of the test "
        "images: for choosing hyperparameters.",
        lower_bound=0.0,
        upper_bound=0.9,
        **options,
    )
    flags.DEFINE_string("data_dir", None, "Folder of prepared TFDS data sets.", **options)
    flags.DEFINE_string("output_dir", None, "Folder for log, plot and statement.", **options)


def _value(flag_values, name):
    """Returns the flag, or what the data set has for it."""
    value = getattr(flag_values, name)
    return getattr(DEFAULTS[flag_values.dataset], name) if value is None else value


def _thresholds(flag_values):
    """Returns C1 and C2."""
    l2_norm_clip = _value(flag_values, "l2_norm_clip")
    if flag_values.optimizer not in WITHOUT_FEEDBACK:
        error_norm_clip = flag_values.error_norm_clip
        return l2_norm_clip, l2_norm_clip if error_norm_clip is None else error_norm_clip
    # DiceSGD passes on C1 + C2 of every gradient; by default DP-SGD does so too.
    return (l2_norm_clip if flag_values.l2_norm_clip is not None else 2 * l2_norm_clip), 0.0


def _compile(model, optimizer):
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def _csv_logger(flag_values):
    if flag_values.output_dir is None:
        return []
    return [keras.callbacks.CSVLogger(str(pathlib.Path(flag_values.output_dir) / "training.csv"))]


def _plot(flag_values, history, steps_per_epoch, delta=None):
    values = history.history
    steps = [(epoch + 1) * steps_per_epoch for epoch in history.epoch]
    path = pathlib.Path(flag_values.output_dir) / "training.png"
    images = "held-out images" if flag_values.validation_fraction else "test images"
    plots.plot_accuracy_and_epsilon(
        path,
        steps,
        {images: values["val_accuracy"], "training images": values["accuracy"]},
        values.get("epsilon"),
        title=f"{flag_values.dataset}, {flag_values.optimizer}",
        delta=delta,
    )
    print(f"Wrote {path}")


def main(argv):
    """Runs the script with the flags of the command line."""
    del argv
    run(flags.FLAGS)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
