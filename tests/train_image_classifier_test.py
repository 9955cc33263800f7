# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The image classifier script: its epsilon, its flags, and a run from start to end."""

import csv
import math
import os
import pathlib
import re
import subprocess
import sys

from absl import app, flags
import dp_accounting
from dp_accounting import rdp
import keras
import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import image_classifier_flags
import image_datasets
import image_models
import private_run
import train_image_classifier

import dice_tf

NUM_DIGITS = 1437
TINY = ("--batch_size=600", "--epochs=1")


def parse(*arguments):
    values = flags.FlagValues()
    image_classifier_flags.define_flags(values)
    values(["train_image_classifier", *arguments])
    return image_classifier_flags.settings_from(values)


def parameters(*arguments, num_examples=NUM_DIGITS):
    plan = train_image_classifier.make_plan(parse(*arguments), num_examples)
    return private_run.privacy_parameters(plan)


def printed_parameters(text):
    return dict(re.findall(r"^  (\w+): (.+)$", text, flags=re.MULTILINE))


def composed_epsilon(probability, noise_multiplier, rounds, delta):
    """Epsilon of Poisson-subsampled Gaussians, by dp_accounting alone."""
    event = dp_accounting.GaussianDpEvent(noise_multiplier)
    if probability < 1:
        event = dp_accounting.PoissonSampledDpEvent(probability, event)
    orders = np.concatenate([1 + np.arange(1, 100) / 10, np.arange(11, 64)])
    accountant = rdp.RdpAccountant(orders).compose(event, rounds)
    return accountant.get_epsilon(delta)


# Sensitivities in units of C1 = C2: what one example can move.
@pytest.mark.parametrize(
    ("arguments", "probability", "rounds", "sensitivity"),
    [
        # 3 cycles of 2 groups in each of 5 epochs; entries are separate: quadrature.
        ([], 2 * 240 / NUM_DIGITS, 15, math.sqrt(2)),
        # 2 cycles of 3 groups.
        (["--num_groups=3"], 3 * 240 / NUM_DIGITS, 10, math.sqrt(2)),
        # 6 draws per epoch; the parts may add up.
        (["--sampling=poisson"], 240 / NUM_DIGITS, 30, 2.0),
        (["--sampling=shuffled"], 1.0, 5, 2.0),
        (["--optimizer=dp_sgd"], 240 / NUM_DIGITS, 30, 1.0),
    ],
    ids=["cyclic", "three groups", "poisson", "shuffled", "dp_sgd"],
)
def test_printed_epsilon_is_that_of_dp_accounting(arguments, probability, rounds, sensitivity):
    printed = parameters(
        "--noise_multiplier=4",
        "--batch_size=240",
        "--epochs=5",
        "--l2_norm_clip=0.3",
        "--delta=1e-5",
        *arguments,
    )
    expected = composed_epsilon(probability, 4 / sensitivity, rounds, 1e-5)
    assert printed["epsilon"] == pytest.approx(expected, rel=1e-9)
    assert printed["sampling_probability"] == pytest.approx(probability)
    assert printed["rounds"] == rounds
    assert printed["noise_stddev"] == pytest.approx(4 * 0.3 / 240)


def test_printed_parameters_are_enough_to_compute_epsilon():
    printed = parameters("--noise_multiplier=3", "--error_norm_clip=0.4", "--l2_norm_clip=0.3")
    sensitivity = math.hypot(printed["l2_norm_clip"], printed["error_norm_clip"])
    expected = composed_epsilon(
        printed["num_groups"] * printed["expected_batch_size"] / printed["num_examples"],
        printed["noise_stddev"] * printed["expected_batch_size"] / sensitivity,
        math.ceil(printed["steps"] / printed["num_groups"]),
        printed["delta"],
    )
    assert printed["epsilon"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("optimizer", "sampling"),
    [("dice_sgd", "cyclic"), ("dice_sgd", "shuffled"), ("dp_sgd", "poisson")],
)
def test_noise_is_calibrated_to_the_budget(optimizer, sampling):
    printed = parameters(f"--optimizer={optimizer}", f"--sampling={sampling}", "--epsilon=3.5")
    assert 3.49 < printed["epsilon"] <= 3.5


def test_plain_command_is_private_at_the_promised_level():
    printed = parameters()
    assert printed["epsilon"] <= 8
    assert printed["delta"] == 1e-4
    assert printed["neighbouring_relation"] == "add_or_remove_one"


def test_setting_of_the_paper_is_the_default_of_the_transformer_on_cifar():
    arguments = ("--dataset=cifar10", "--model=vit")
    plan = train_image_classifier.make_plan(parse(*arguments), 50_000)
    printed = private_run.privacy_parameters(plan)
    assert (printed["steps"], printed["expected_batch_size"], printed["delta"]) == (150, 1000, 1e-5)
    assert 1.99 < printed["epsilon"] <= 2.0
    # Every other step may hold an example, of one group of two, with probability 2 * 1000 / 50000.
    expected = composed_epsilon(0.04, printed["noise_multiplier"] / math.sqrt(2), 75, 1e-5)
    assert printed["epsilon"] == pytest.approx(expected, rel=1e-9)
    assert printed["noise_multiplier"] == pytest.approx(1.7003, rel=1e-3)
    # The step size of the ablation: in units of the threshold.
    assert plan.optimizer.rescale_to_unit_norm
    assert parse("--dataset=cifar100", "--model=vit")[2:] == parse(*arguments)[2:]
    assert parse(*arguments).preset == "vit_base_patch16_224_imagenet"


def test_rescaled_steps_are_as_long_at_the_default_threshold():
    plain, rescaled = parse(), parse("--rescale_to_unit_norm")
    assert rescaled.learning_rate == pytest.approx(plain.learning_rate * plain.l2_norm_clip)
    back = parse("--dataset=cifar10", "--model=vit", "--norescale_to_unit_norm")
    assert back.learning_rate * back.l2_norm_clip == pytest.approx(0.05)
    dp = parse("--rescale_to_unit_norm", "--optimizer=dp_sgd")
    assert dp.learning_rate / dp.l2_norm_clip == pytest.approx(plain.learning_rate)
    assert parse("--rescale_to_unit_norm", "--learning_rate=7").learning_rate == 7


def test_dp_sgd_passes_on_as_much_of_a_gradient_by_default():
    dice, dp = parameters(), parameters("--optimizer=dp_sgd")
    assert dp["error_norm_clip"] == 0
    assert dp["l2_norm_clip"] == dice["l2_norm_clip"] + dice["error_norm_clip"]
    assert parameters("--optimizer=dp_sgd", "--l2_norm_clip=0.7")["l2_norm_clip"] == 0.7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epsilon=2", "--noise_multiplier=1"], "--epsilon and --noise_multiplier exclude"),
        (["--optimizer=dp_sgd", "--error_norm_clip=1"], "dp_sgd has no error feedback"),
        (["--optimizer=sgd", "--epsilon=2"], "not private and takes no --epsilon"),
        (["--optimizer=sgd", "--noise_multiplier=2"], "takes no --noise_multiplier"),
        (["--optimizer=sgd", "--chunk_size=2"], "takes no --chunk_size"),
        (["--preset=random"], "--preset=random is for --model=vit"),
    ],
)
def test_contradicting_flags_are_refused(arguments, message):
    with pytest.raises(app.UsageError, match=message):
        parse(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epsilon=-1"], "target_epsilon"),
        (["--delta=0.01"], "`delta` must be below 1/N = 1/1437"),
        (["--l2_norm_clip=0"], "l2_norm_clip"),
        (["--batch_size=1000"], "expected_batch_size"),
        (["--noise_multiplier=-2"], "noise_multiplier"),
    ],
)
def test_impossible_privacy_parameters_are_refused(arguments, message):
    with pytest.raises(dice_tf.errors.DicePrivacyError, match=message):
        parameters(*arguments)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return str(tmp_path_factory.mktemp("tfds"))


def test_script_trains_and_reports(data_dir, tmp_path):
    output_dir = tmp_path / "new" / "folder"
    script = subprocess.run(
        [
            sys.executable,
            str(EXAMPLES / "train_image_classifier.py"),
            f"--data_dir={data_dir}",
            f"--output_dir={output_dir}",
            *TINY,
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert script.returncode == 0, script.stderr
    printed = printed_parameters(script.stdout)
    assert (printed["steps"], printed["expected_batch_size"]) == ("2", "600")
    sensitivity = math.hypot(float(printed["l2_norm_clip"]), float(printed["error_norm_clip"]))
    expected = composed_epsilon(
        float(printed["sampling_probability"]),
        float(printed["noise_multiplier"]) * float(printed["l2_norm_clip"]) / sensitivity,
        1,
        1e-4,
    )
    assert float(printed["epsilon"]) == pytest.approx(expected, rel=1e-9)

    last = script.stdout.splitlines()[-5:]
    epsilon = (
        f"({math.ceil(1000 * expected) / 1000:.3f}, 0.0001)-differential privacy after 2 steps"
    )
    assert any(epsilon in line and "added or removed" in line for line in last)
    with open(output_dir / "training.csv", encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert float(row["epsilon"]) == pytest.approx(expected, rel=1e-6)
    assert f"Accuracy on 360 test images: {float(row['val_accuracy']):.4f}" in last[-1]
    assert (output_dir / "training.png").read_bytes().startswith(b"\x89PNG")
    statement = (output_dir / "privacy_statement.txt").read_text(encoding="utf-8")
    assert "1437" in statement and "NOT secret" not in statement


def test_seed_makes_a_run_reproducible_and_says_that_it_is_no_secret(data_dir, tmp_path, capsys):
    arguments = (f"--data_dir={data_dir}", f"--output_dir={tmp_path}", "--seed=3")
    # Held-out images leave fewer to train on, and the test images alone.
    settings = parse(*arguments, "--validation_fraction=0.2", "--batch_size=500", "--epochs=1")
    histories = [train_image_classifier.run(settings).history for _ in range(2)]
    assert histories[0] == histories[1]
    printed = capsys.readouterr().out
    assert "private only while nobody knows it" in printed
    assert printed_parameters(printed)["num_examples"] == "1150"
    assert "Accuracy on 287 held-out training images" in printed
    assert "NOT secret" in (tmp_path / "privacy_statement.txt").read_text(encoding="utf-8")


def test_transformer_trains_on_images_like_those_of_cifar(tmp_path, monkeypatch, capsys):
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (80, 32, 32, 3)).astype("uint8")
    labels = np.arange(80) % 10
    data = image_datasets.ImageData(images[:64], labels[:64], images[64:], labels[64:], 10, "noise")
    monkeypatch.setattr(image_datasets, "load_images", lambda name, data_dir: data)
    tiny = dict(patch_size=16, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=8)
    monkeypatch.setattr(image_models, "RANDOM_VIT", tiny)
    arguments = ("--batch_size=16", "--delta=1e-3", "--epochs=1", "--chunk_size=10")
    history = train_image_classifier.run(
        parse("--dataset=cifar10", "--model=vit", "--preset=random", *arguments)
    )
    printed = capsys.readouterr().out
    assert printed_parameters(printed)["num_examples"] == "64"
    assert 1.99 < history.history["epsilon"][-1] <= 2.0
    assert np.isfinite(history.history["loss"][-1])


def test_plain_sgd_says_that_it_is_not_private(data_dir, tmp_path, capsys):
    history = train_image_classifier.run(
        parse(f"--data_dir={data_dir}", f"--output_dir={tmp_path}", "--optimizer=sgd", *TINY)
    )
    printed = capsys.readouterr().out
    assert printed.count("WITHOUT privacy: epsilon is infinite") == 2
    assert "epsilon" not in history.history
    assert (tmp_path / "training.png").is_file()
    assert not (tmp_path / "privacy_statement.txt").exists()


@pytest.mark.parametrize(
    ("dataset", "shape", "num_classes"),
    [
        ("digits", (8, 8, 1), 10),
        ("fashion_mnist", (28, 28, 1), 10),
        ("mnist", (28, 28, 1), 10),
        ("cifar10", (32, 32, 3), 10),
        ("cifar100", (32, 32, 3), 100),
    ],
)
def test_every_data_set_has_a_model_that_can_be_private(dataset, shape, num_classes):
    assert dataset in image_datasets.DATASETS
    model = image_models.build_model(dataset, shape, num_classes)
    dice_tf.check_model(model)
    logits = model(np.full((3, *shape), 255, dtype=np.uint8))
    assert logits.shape == (3, num_classes)
    assert all(type(layer).__module__.startswith("keras.") for layer in model.layers)
    assert not any(isinstance(layer, keras.layers.BatchNormalization) for layer in model.layers)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
