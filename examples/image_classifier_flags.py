# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Flags of `train_image_classifier.py`, and their defaults for each data set and model."""

from typing import NamedTuple

from absl import app, flags
import image_models
import private_run

import dice_tf

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
    """Values of the flags that depend on the data set and the model."""

    epsilon: float
    delta: float
    l2_norm_clip: float
    batch_size: int
    epochs: int
    learning_rate: float
    momentum: float
    rescale_to_unit_norm: bool = False
    chunk_size: int | None = None


# Found on held-out training images: digits by five-fold cross-validation over models
# (linear, one hidden layer, convolution), batch size and epochs, threshold and learning
# rate; fashion_mnist over the learning rate alone; mnist_5000 over three learning rates and two
# batch sizes. The others were not searched: mnist takes the values of fashion_mnist, and
# cifar is a starting point.
DEFAULTS = {
    "digits": Defaults(8.0, 1e-4, 0.1, 256, 40, 2.0, 0.9),
    "mnist_5000": Defaults(8.0, 2e-5, 0.1, 512, 40, 2.0, 0.9),
    "mnist": Defaults(2.7, 1e-5, 0.1, 2048, 15, 4.0, 0.9),
    "fashion_mnist": Defaults(2.7, 1e-5, 0.1, 2048, 15, 4.0, 0.9),
    "cifar10": Defaults(7.5, 1e-5, 0.1, 2048, 30, 2.0, 0.9),
    "cifar100": Defaults(7.5, 1e-5, 0.1, 2048, 30, 2.0, 0.9),
}

# The setting of the paper's image experiments (Zhang et al., ICLR 2024): 3 epochs of batches of
# 1000 at (2, 1e-5), and the step size of its ablation, in units of the threshold. Threshold
# and step size are a starting point that was not searched. The chunks bound memory only.
_PAPER = Defaults(2.0, 1e-5, 1.0, 1000, 3, 0.05, 0.0, rescale_to_unit_norm=True, chunk_size=100)
VIT_DEFAULTS = {**DEFAULTS, "cifar10": _PAPER, "cifar100": _PAPER}
MODEL_DEFAULTS = {"cnn": DEFAULTS, "vit": VIT_DEFAULTS}
# The smallest transformer pretrained on ImageNet alone that keras-hub has.
DEFAULT_PRESET = "vit_base_patch16_224_imagenet"


class Settings(NamedTuple):
    """The flags of one run, with the defaults of its data set filled in.

    Attributes: as the flags of these names, see `define_flags`. `epsilon` is `None` if
    `noise_multiplier` was given, and the other way round.
    """

    dataset: str
    model: str
    preset: str | None
    optimizer: str
    epsilon: float | None
    noise_multiplier: float | None
    delta: float
    accountant: str
    l2_norm_clip: float
    error_norm_clip: float
    batch_size: int
    epochs: int
    learning_rate: float
    momentum: float
    rescale_to_unit_norm: bool
    chunk_size: int | None
    sampling: str
    num_groups: int
    seed: int | None
    validation_fraction: float
    strategy: str
    data_dir: str | None
    output_dir: str | None


def define_flags(flag_values):
    """Defines the flags of this script.

    Args:
        flag_values: `absl.flags.FlagValues` to define them in.
    """
    options = {"flag_values": flag_values}
    flags.DEFINE_enum("dataset", "digits", list(DEFAULTS), "Data set.", **options)
    flags.DEFINE_enum(
        "model",
        "cnn",
        list(MODEL_DEFAULTS),
        "A small convolutional network, or keras-hub's vision transformer.",
        **options,
    )
    flags.DEFINE_string(
        "preset",
        None,
        "Weights that --model=vit starts from: a preset of keras_hub.models.ViTBackbone, which is "
        f"downloaded, a folder that holds one, or {image_models.RANDOM} for a small transformer "
        f"with random weights. Default: {DEFAULT_PRESET}.",
        **options,
    )
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
        (
            "rescale_to_unit_norm",
            flags.DEFINE_boolean,
            "Divides the noised direction by l2_norm_clip, so that the learning rate hardly "
            "depends on it. Post-processing: epsilon stays.",
        ),
        ("chunk_size", flags.DEFINE_integer, "Examples at once. Bounds memory, changes no result."),
    ):
        text += " Default: depends on the data set and the model, see MODEL_DEFAULTS."
        define(name, None, text, **options)
    flags.DEFINE_float(
        "noise_multiplier",
        None,
        "Instead of --epsilon: noise standard deviation on the sum of clipped gradients, "
        "divided by l2_norm_clip.",
        **options,
    )
    private_run.define_accountant(flag_values)
    flags.DEFINE_float("error_norm_clip", None, "Threshold C2. Default: l2_norm_clip.", **options)
    flags.DEFINE_enum(
        "sampling",
        None,
        SAMPLINGS,
        "How batches are drawn: by Poisson sampling from groups that take turns, from all images, "
        "or each image once per epoch (which amplifies no privacy). Default: cyclic; poisson for "
        "dp_sgd, which without feedback only loses by groups.",
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
    flags.DEFINE_enum(
        "strategy",
        "default",
        ["default", "mirrored"],
        "mirrored shares every batch out among all GPUs there are (on the CPU without any).",
        **options,
    )
    flags.DEFINE_string("data_dir", None, "Folder of prepared TFDS data sets.", **options)
    flags.DEFINE_string("output_dir", None, "Folder for log, plot and statement.", **options)


def settings_from(flag_values):
    """Returns the settings that flags mean.

    Args:
        flag_values: Parsed flags.

    Returns:
        `Settings`.

    Raises:
        absl.app.UsageError: If flags contradict each other.
    """
    _check(flag_values)
    values = {name: getattr(flag_values, name) for name in Settings._fields}
    default = MODEL_DEFAULTS[flag_values.model][flag_values.dataset]._asdict()
    feedback = flag_values.optimizer not in WITHOUT_FEEDBACK
    if flag_values.rescale_to_unit_norm not in (None, default["rescale_to_unit_norm"]):
        # The same steps at the default threshold.
        unit = default["l2_norm_clip"]
        default["learning_rate"] *= unit if flag_values.rescale_to_unit_norm else 1 / unit
        default["rescale_to_unit_norm"] = flag_values.rescale_to_unit_norm
    if not feedback:
        # DiceSGD passes on C1 + C2 of every gradient. So does DP-SGD, with twice the threshold.
        default["l2_norm_clip"] *= 2
        if default["rescale_to_unit_norm"]:
            default["learning_rate"] *= 2
    if flag_values.optimizer == NON_PRIVATE:
        default["learning_rate"] = NON_PRIVATE_LEARNING_RATE
    if flag_values.noise_multiplier is not None:
        del default["epsilon"]
    default["sampling"] = "cyclic" if feedback else "poisson"
    if flag_values.model == "vit":
        default["preset"] = DEFAULT_PRESET
    for name, value in default.items():
        values[name] = value if values[name] is None else values[name]
    if values["error_norm_clip"] is None:
        values["error_norm_clip"] = values["l2_norm_clip"] if feedback else 0.0
    return Settings(**values)


def _check(flag_values):
    given = lambda name: getattr(flag_values, name) is not None
    if given("preset") and flag_values.model != "vit":
        raise app.UsageError(
            f"--preset={flag_values.preset} is for --model=vit. Received: "
            f"--model={flag_values.model}. Add --model=vit, or leave --preset out."
        )
    if given("epsilon") and given("noise_multiplier"):
        raise app.UsageError(
            "--epsilon and --noise_multiplier exclude each other: the first computes the noise, "
            f"the second sets it. Received: --epsilon={flag_values.epsilon}, "
            f"--noise_multiplier={flag_values.noise_multiplier}. Leave one out."
        )
    if flag_values.optimizer in WITHOUT_FEEDBACK and flag_values.error_norm_clip:
        raise app.UsageError(
            f"--optimizer={flag_values.optimizer} has no error feedback. Received: "
            f"--error_norm_clip={flag_values.error_norm_clip}. Use --optimizer=dice_sgd."
        )
    if flag_values.optimizer == NON_PRIVATE:
        private = ("epsilon", "noise_multiplier", "delta", "l2_norm_clip", "error_norm_clip",
                   "rescale_to_unit_norm", "chunk_size")  # fmt: skip
        extra = [f"--{name}" for name in private if given(name)]
        if extra:
            raise app.UsageError(
                f"--optimizer={NON_PRIVATE} is not private and takes no {', '.join(extra)}. "
                f"Use one of {tuple(PRIVATE_OPTIMIZERS)}."
            )
