# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""The search of ablation.py for a language model.

What it shows: the ablation figures of the paper for GPT-2 on E2E NLG. As ablation.py, with
the model, the data and the flags of `finetune_text.py --task=generate`. Accuracy is the part
of the next tokens of held-out texts that is predicted; the paper scores generated
texts. Adam hardly notices the scale of a direction, so nothing is rescaled.

    python examples/ablation_text.py
    python examples/ablation_text.py --model=tiny --batch_size=64 \
        --train_file=a.csv --test_file=b.csv

What it needs: as finetune_text.py. How long it takes: one run of that script per cell, 50
by default, so days on one GPU. It shows the time that is left and can be killed; see
ablation.py for that, for its files, and for what such a search costs on private data.
"""

import ablation
from absl import app, flags, logging
import finetune_text
import text_datasets
import text_finetuning_flags
import text_models
import text_tokens


def load_texts(settings):
    """Returns the `ablation.Task` of `finetune_text.py --task=generate`."""
    if settings.train_file is None:
        pairs = text_datasets.load_e2e(settings.data_dir)
    else:
        pairs = text_datasets.load_pairs(settings.train_file, settings.test_file)
    data = text_datasets.selected(pairs, settings.num_examples, settings.validation_fraction)

    new_model = lambda: text_models.language_model(
        settings.model, settings.sequence_length, settings.lora_rank
    )
    _, tokenizer = new_model()

    def make_model(optimizer):
        model, _ = new_model()
        model.compile(
            optimizer=optimizer,
            loss=finetune_text.token_loss(),
            metrics=[finetune_text.accuracy],
            # The default of keras-hub would count padding.
            weighted_metrics=[],
        )
        return model

    arrays = lambda texts: text_tokens.pack_pairs(tokenizer, texts, settings.sequence_length)
    return ablation.Task(
        arrays(data.train), arrays(data.test), data.source, settings.model, make_model
    )


TEXTS = ablation.Trainer(
    text_finetuning_flags.settings_from, finetune_text.make_optimizer, load_texts
)


def define_flags(flag_values):
    """Defines the flags of finetune_text.py, and those of the grids.

    Args:
        flag_values: `absl.flags.FlagValues` to define them in.
    """
    text_finetuning_flags.define_flags(flag_values)
    ablation.define_flags(flag_values)


def run(flag_values):
    """Runs the search; see `ablation.run`."""
    if flag_values.task != "generate":
        raise app.UsageError(
            f"This search is about generating texts. Received: --task={flag_values.task}."
        )
    return ablation.run(flag_values, TEXTS)


def main(argv):
    """Runs the script with the flags of the command line."""
    del argv
    logging.set_verbosity(logging.WARNING)
    run(flags.FLAGS)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    for module in (text_finetuning_flags, ablation):
        flags.adopt_module_key_flags(module)  # For --help.
    app.run(main)
