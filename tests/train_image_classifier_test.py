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
import keras
import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
sys.path.insert(0, str(pathlib.Path(__file__).parent))

from dp_accounting_oracle import TOLERANCE, composed_epsilon
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


def planned(*arguments, num_examples=NUM_DIGITS):
    """Returns the plan of a command, and the mechanism of its optimizer."""
    settings = parse(*arguments)
    plan = private_run.make_plan(settings, num_examples)
    return plan, train_image_classifier.make_optimizer(settings, plan).mechanism


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
        (["--accountant=rdp"], 2 * 240 / NUM_DIGITS, 15, math.sqrt(2)),
    ],
    ids=["cyclic", "three groups", "poisson", "shuffled", "dp_sgd", "rdp"],
)
def test_epsilon_is_that_of_dp_accounting(arguments, probability, rounds, sensitivity):
    plan, mechanism = planned(
        "--noise_multiplier=4",
        "--batch_size=240",
        "--epochs=5",
        "--l2_norm_clip=0.3",
        "--delta=1e-5",
        *arguments,
    )
    assert plan.accountant == ("rdp" if "--accountant=rdp" in arguments else "pld")
    expected = composed_epsilon(probability, 4 / sensitivity, rounds, 1e-5, plan.accountant)
    assert plan.epsilon() == pytest.approx(expected, rel=TOLERANCE[plan.accountant])
    assert plan.sampling.sampling_probability == pytest.approx(probability)
    assert plan.sampling.rounds(plan.steps) == rounds
    assert mechanism.noise_stddev == pytest.approx(4 * 0.3 / 240)


def test_plan_counts_other_thresholds_for_the_residual():
    plan, mechanism = planned("--noise_multiplier=3", "--error_norm_clip=0.4", "--l2_norm_clip=0.3")
    assert (mechanism.l2_norm_clip, mechanism.error_norm_clip) == pytest.approx((0.3, 0.4))
    # By hand: thresholds of 0.3 and 0.4, 120 cycles of 2 groups, batches of 256.
    assert mechanism.noise_stddev == pytest.approx(3 * 0.3 / 256)
    expected = composed_epsilon(512 / NUM_DIGITS, 3 * 0.3 / 0.5, 120, 1e-4)
    assert plan.steps == 240 and plan.epsilon() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("optimizer", "sampling"),
    [("dice_sgd", "cyclic"), ("dice_sgd", "shuffled"), ("dp_sgd", "poisson")],
)
def test_noise_is_calibrated_to_the_budget(optimizer, sampling):
    plan, _ = planned(f"--optimizer={optimizer}", f"--sampling={sampling}", "--epsilon=3.5")
    assert 3.49 < plan.epsilon() <= 3.5


def test_plain_command_is_private_at_the_promised_level():
    plan, mechanism = planned()
    # Both thresholds are one size.
    expected = composed_epsilon(512 / NUM_DIGITS, plan.noise_multiplier / math.sqrt(2), 120, 1e-4)
    assert expected == pytest.approx(plan.epsilon(), rel=1e-4)
    assert 7.99 < plan.epsilon() <= 8 and plan.delta == 1e-4
    assert (mechanism.feedback_steps, plan.feedback_steps) == (1, 1)
    # The accountant of TF-Privacy asks for more noise.
    by_rdp, _ = planned("--accountant=rdp")
    assert by_rdp.noise_multiplier > 1.05 * plan.noise_multiplier


def test_setting_of_the_paper_is_the_default_of_the_transformer_on_cifar():
    arguments = ("--dataset=cifar10", "--model=vit")
    plan, _ = planned(*arguments, num_examples=50_000)
    assert (plan.steps, plan.batch_size, plan.delta) == (150, 1000, 1e-5)
    assert 1.99 < plan.epsilon() <= 2.0
    # Every other step may hold an example, of one group of two, with probability 2 * 1000 / 50000.
    expected = composed_epsilon(0.04, plan.noise_multiplier / math.sqrt(2), 75, 1e-5)
    assert plan.epsilon() == pytest.approx(expected, rel=1e-4)
    assert plan.noise_multiplier == pytest.approx(1.5715, rel=1e-3)
    by_rdp, _ = planned(*arguments, "--accountant=rdp", num_examples=50_000)
    assert by_rdp.noise_multiplier == pytest.approx(1.7003, rel=1e-3)
    # The step size of the ablation: in units of the threshold.
    optimizer = train_image_classifier.make_optimizer(parse(*arguments), plan)
    assert optimizer.rescale_to_unit_norm and optimizer.chunk_size == 100
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
    (_, dice), (_, dp) = planned(), planned("--optimizer=dp_sgd")
    assert dp.error_norm_clip == 0
    assert dp.l2_norm_clip == dice.l2_norm_clip + dice.error_norm_clip
    assert planned("--optimizer=dp_sgd", "--l2_norm_clip=0.7")[1].l2_norm_clip == 0.7


@pytest.mark.parametrize("clip", ["0", "-1"])
def test_no_threshold_is_refused(clip):
    for optimizer in ("dice_sgd", "dp_sgd"):
        with pytest.raises(app.UsageError, match=f"--l2_norm_clip={float(clip)}"):
            planned(f"--optimizer={optimizer}", f"--l2_norm_clip={clip}")


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
        (["--l2_norm_clip=nan"], "error_norm_clip_ratio"),
        (["--batch_size=1000"], "expected_batch_size"),
        (["--noise_multiplier=-2"], "noise_multiplier"),
    ],
)
def test_impossible_privacy_parameters_are_refused(arguments, message):
    with pytest.raises(dice_tf.errors.DicePrivacyError, match=message):
        planned(*arguments)


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
            "--noise_multiplier=3",
            *TINY,
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert script.returncode == 0, script.stderr
    # One cycle of two groups.
    expected = composed_epsilon(2 * 600 / NUM_DIGITS, 3 / math.sqrt(2), 1, 1e-4)
    rounded = f"{math.ceil(1000 * expected) / 1000:.3f}"
    for line in (
        r"data +1437 examples, 600 expected in a batch",
        r"steps +2 = 1 epochs of 2 steps",
        r"noise_multiplier +3",
        rf"epsilon +{rounded} by PLD, the accountant of this plan; [\d.]+ by RDP",
    ):
        assert re.search(f"^  {line}", script.stdout, re.MULTILINE), line

    last = script.stdout.splitlines()[-5:]
    epsilon = f"({rounded}, 0.0001)-differential privacy after 2 steps"
    assert any(epsilon in line and "added or removed" in line for line in last)
    with open(output_dir / "training.csv", encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert float(row["epsilon"]) == pytest.approx(expected, rel=1e-4)
    assert f"Accuracy on 360 test images: {float(row['val_accuracy']):.4f}" in last[-1]
    assert (output_dir / "training.png").read_bytes().startswith(b"\x89PNG")
    statement = (output_dir / "privacy_statement.txt").read_text(encoding="utf-8")
    assert "1437" in statement and "NOT secret" not in statement
    assert f"epsilon = {rounded} (PLD accountant)" in " ".join(statement.split())


def test_seed_makes_a_run_reproducible_and_says_that_it_is_no_secret(data_dir, tmp_path, capsys):
    arguments = (f"--data_dir={data_dir}", f"--output_dir={tmp_path}", "--seed=3")
    # Held-out images leave fewer to train on, and the test images alone.
    settings = parse(*arguments, "--validation_fraction=0.2", "--batch_size=500", "--epochs=1")
    histories = [train_image_classifier.run(settings).history for _ in range(2)]
    assert histories[0] == histories[1]
    printed = capsys.readouterr().out
    assert "private only while nobody knows it" in printed
    assert "1150 examples, 500 expected in a batch" in printed
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
    assert "64 examples, 16 expected in a batch" in printed
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
