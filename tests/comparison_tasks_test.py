# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tasks of compare.py: a network, which the package trains in searches, too; and texts."""

import csv
import pathlib
import sys

from absl import app, flags
import keras
import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import compare
import comparison_features
import comparison_runs
import comparison_search
import comparison_tasks
import image_datasets
import text_models
import text_tokens
import train_on_features

QUICK = comparison_tasks.Options(quick=True)
# At this epsilon there is next to no noise.
TRIAL = comparison_search.Trial(
    "DP-SGD", 1e4, 1, 0, seed=3, batch_size=64, feedback_steps=0, share=1.0, clip=0.2,
    step_length=4.0, momentum=0.0, averaged_part=0.0,
)  # fmt: skip


@pytest.fixture
def bright_rows(monkeypatch):
    """In place of Fashion-MNIST: the class says which rows of an image are bright."""
    random = np.random.default_rng(0)

    def images(count):
        labels = random.integers(0, 10, count)
        pixels = random.integers(0, 100, (count, 28, 28, 1))
        for image, label in zip(pixels, labels, strict=True):
            image[2 * label + 4 : 2 * label + 8] += 150
        return pixels.astype(np.uint8), labels

    data = image_datasets.ImageData(*images(1300), *images(300), 10, "bright rows")
    monkeypatch.setattr(image_datasets, "load_images", lambda name, folder: data)


def rows_of(path):
    with path.open(encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def test_the_network_is_trained_by_the_package_without_held_out_images(bright_rows, tmp_path):
    task = comparison_tasks.fashion_mnist_cnn(QUICK)
    assert not task.linear and (len(task.x), task.held_out, len(task.test[0])) == (1200, 200, 200)
    runs = comparison_runs.Runs(tmp_path, task, threads=2)
    dice = TRIAL._replace(method="DiceSGD", feedback_steps=3, share=0.3)
    scores = runs.search_scores([TRIAL, dice, TRIAL])
    assert scores[0] == scores[2]
    assert {row["num_examples"] for row in rows_of(tmp_path / "noise.csv")} == {"1000"}
    found = rows_of(tmp_path / "search.csv")
    assert [row["method"] for row in found] == ["DP-SGD", "DiceSGD"]
    x, y = task.x[1000:], task.y[1000:]
    for trial, score in zip((TRIAL, dice), scores, strict=False):
        model = runs.train(trial, for_search=True, self_check=False)
        assert score == pytest.approx(np.mean(model.predict(x, verbose=0).argmax(1) == y), abs=0.01)
        # Two of ten would be luck.
        assert score > 0.3

    def trained(*arguments, **options):
        raise AssertionError("It was known.")

    again = comparison_runs.Runs(tmp_path, task)
    again.train = trained
    assert again.search_scores([dice, TRIAL]) == [scores[1], scores[0]]


def test_both_methods_start_from_the_same_weights_and_seeds_from_others(bright_rows, tmp_path):
    task, starts = comparison_tasks.fashion_mnist_cnn(QUICK), []

    def make_model():
        model = task.make_model()
        starts.append(model.get_weights()[0])
        return model

    runs = comparison_runs.Runs(tmp_path, task._replace(make_model=make_model))
    dice = TRIAL._replace(method="DiceSGD", feedback_steps=3, share=0.3)
    for trial in (TRIAL, dice, TRIAL._replace(seed=4)):
        runs.train(trial, for_search=False, self_check=False)
    np.testing.assert_array_equal(starts[0], starts[1])
    assert np.abs(starts[0] - starts[2]).max() > 0.01


def test_a_run_with_the_network(bright_rows, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(comparison_search, "_FINALISTS", 1)
    values = flags.FlagValues()
    compare.define_flags(values)
    common = ("--quick", "--epsilons=8", "--epochs=1", "--draws=1", "--feedback_steps=3",
              "--batches=64", "--test_seeds=2", f"--output_dir={tmp_path}")  # fmt: skip
    values(["compare", *common, "--stacked_seeds=1"])
    with pytest.raises(app.UsageError, match="fashion_mnist_cnn is not linear.*stacked_seeds=1"):
        compare.run_task("fashion_mnist_cnn", values)
    values["stacked_seeds"].value = 0
    (summary,) = compare.run_task("fashion_mnist_cnn", values)
    printed = capsys.readouterr().out
    assert "[search: 1 of 2 trainings of this wave" in printed and "[test: 0 left" in printed
    assert summary.choice.at_edge == () and [len(s) for s in summary.scores.values()] == [2, 2]
    rows = rows_of(tmp_path / "fashion_mnist_cnn" / "test_package.csv")
    assert {row["seed"] for row in rows} == {"100", "101"}
    assert all(7.99 < float(row["epsilon"]) <= 8 for row in rows)


def test_convolutions_are_the_inputs_of_train_on_features(bright_rows):
    task = comparison_tasks.fashion_mnist_convolutions(QUICK)
    images = image_datasets.load_images("fashion_mnist", None)
    assert task.linear and len(task.x) == 1200 and task.outputs == 10
    np.testing.assert_array_equal(task.y, images.y_train[:1200])
    expected = train_on_features._inputs(images.x_train[:1200])
    np.testing.assert_allclose(task.x, expected, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(task.x[:, :-1], axis=1), 1, rtol=1e-3)


@pytest.fixture
def wordnet(tmp_path):
    """480 definitions in the format of WordNet, of animals (5) and feelings (12)."""
    lines = [
        f'0 {kind:02d} n 01 word 0 000 | a {noun} of {"much " * (number % 4)}type {number}; "so"\n'
        for number in range(240)
        for kind, noun in ((5, "beast"), (12, "passion"))
    ]
    (tmp_path / "data.noun").write_text("".join(lines), encoding="utf-8")
    return tmp_path


def test_definitions_are_in_one_part_only_and_have_their_kind(wordnet, monkeypatch):
    seen = []
    monkeypatch.setattr(
        comparison_features, "encoded", lambda texts, _: (seen.extend(texts), np.ones((480, 3)))[1]
    )
    task = comparison_tasks.definitions(QUICK._replace(wordnet_dir=str(wordnet)))
    assert len(set(seen)) == 480
    assert (len(task.x), task.held_out, len(task.test[0])) == (280, 56, 200)
    assert task.linear and task.delta < 1 / 280
    kinds = [*task.y, *task.test[1]]
    assert kinds == [2 if "beast" in text else 9 for text in seen]


def test_embeddings_are_the_mean_of_a_text_whatever_is_encoded_with_it(wordnet, monkeypatch):
    keras.utils.set_random_seed(0)
    made = text_models.text_encoder("tiny", 24)
    monkeypatch.setattr(text_models, "text_encoder", lambda name, length: made)
    monkeypatch.setattr(comparison_features, "_TEXTS_AT_ONCE", 3)
    texts = ["a long and winding road", "fish", "a feeling", "b", "a text of many, many tokens"]
    options = QUICK._replace(cache_dir=str(wordnet))
    found = comparison_features.encoded(texts, options)
    encoder, tokenizer = made
    backbone = encoder.get_layer("bert_backbone")
    for text, row in zip(texts, found, strict=True):
        # Alone, without padding.
        (tokens,) = tokenizer.encode([text])
        packed = text_tokens.pack_texts(tokenizer, [text], min(24, len(tokens) + 2))
        segments = np.zeros_like(packed["token_ids"])
        outputs = backbone({**packed, "segment_ids": segments})["sequence_output"][0]
        mean = np.mean(outputs, axis=0)
        np.testing.assert_allclose(row[:-1], mean / np.linalg.norm(mean), atol=2e-3)
        assert row[-1] == np.float32(0.1)
    made = None  # Read from disk.
    np.testing.assert_array_equal(comparison_features.encoded(texts, options), found)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
