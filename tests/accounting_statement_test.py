# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The privacy statement and the command line that prints it."""

import math
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from dice_tf import accounting
from dice_tf.accounting.epsilon import PrivacyGuarantee
from dice_tf.errors import AccountingError
from dice_tf.mechanism import DiceMechanism
from dice_tf.sampling import CyclicPoissonSampling, PoissonSampling, ShuffledEpochs

ROOT = pathlib.Path(__file__).resolve().parent.parent
CYCLIC = CyclicPoissonSampling(60_000, 2048)

GOLDEN = """\
GUARANTEE
  The model after 585 steps, with all models on the way, is (epsilon,
  delta)-differentially private with epsilon = 2.918 (RDP accountant) and delta = 1e-05.
  Two data sets that cannot be told apart: one example is added or removed
  (add_or_remove_one).
  epsilon by the RDP accountant: 2.918
  epsilon by the PLD accountant: 2.664 (for information: it holds, too)
  An attacker who sees all of these models, and wrongly accuses 0.1 %, 1 % or 10 % of
  the examples that were not used, rightly accuses at most 0.8 %, 4.5 % or 25.4 % of
  those that were.

PARAMETERS
  number of examples N        60000
  expected batch size B       2048
  sampling                    CyclicPoissonSampling
  groups                      2
  sampling probability        0.0682667
  steps T                     585
  delta                       1e-05
  neighbouring relation       add_or_remove_one
  l2_norm_clip C1             0.25
  error_norm_clip C2          0.25
  bound_residuals             True
  feedback_steps              1
  clipping                    flat
  num_microbatches            none: each example is clipped
  noise_multiplier            2.85
  noise on the mean (stddev)  0.0003479
  noise key is secret         True
  draws are secret            True
  accountant                  RDP

HOW IT IS ACCOUNTED
- Every example is drawn by its own coin, with probability 0.0682667, once per cycle of
  2 groups: 293 rounds. An unfinished cycle at the end counts in full.
- An example is back only after its residual has been fed back, so its influence on 2
  releases adds up in quadrature: sensitivity sqrt(C1^2 + C2^2/1).

FOR COMPARISON
  epsilon                                                      RDP         PLD
  this run                                                   2.918       2.664
  DP-SGD clipping to C1 + C2 = 0.5                           3.183       2.899
  DP-SGD clipping to C1 = 0.25                               1.270       1.159
"""


def make_mechanism(batch=2048, **overrides):
    arguments = dict(l2_norm_clip=0.25, noise_multiplier=2.85, expected_batch_size=batch)
    return DiceMechanism(**{**arguments, **overrides})


def squeezed(text):
    return " ".join(text.split())


def start_command(*arguments):
    command = [sys.executable, "-m", "dice_tf.accounting", "--num_examples=60000"]
    command += ["--batch_size=2048", "--l2_norm_clip=0.25", *arguments]
    environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3")
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def test_command_line():
    golden = start_command("--steps=585", "--noise_multiplier=2.85", "--delta=1e-5")
    refused = start_command("--steps=585", "--noise_multiplier=2.85", "--delta=1e-3")
    calibrated = start_command(
        "--epochs=3", "--target_epsilon=1.5", "--delta=1e-5", "--sampling=poisson",
        "--error_norm_clip=0", "--accountant=pld", "--group_size=2",
    )  # fmt: skip

    output, errors = golden.communicate()
    assert golden.returncode == 0, errors
    assert output.splitlines()[: len(GOLDEN.splitlines())] == GOLDEN.splitlines()
    whole = accounting.privacy_statement(make_mechanism(), CYCLIC, 585, 1e-5)
    assert output.strip() == whole.strip()

    output, errors = refused.communicate()
    assert refused.returncode == 2 and not output
    assert "`delta` must be below 1/N = 1/60000" in errors and "Traceback" not in errors

    output, errors = calibrated.communicate()
    assert calibrated.returncode == 0, errors
    assert "epsilon by the PLD accountant: 1.500\n" in output
    assert "epsilon = 1.500 (PLD accountant) and" in squeezed(output)
    assert "PoissonSampling" in output and "this is DP-SGD" in output
    assert "For a person with up to 2 examples epsilon = " in squeezed(output)
    assert f"steps T                     {PoissonSampling(60_000, 2048).steps(3)}" in output


def test_numbers_come_from_the_api_and_are_rounded_up():
    mechanism = make_mechanism()
    text = accounting.privacy_statement(mechanism, CYCLIC, 585, 1e-5)
    arguments = (mechanism.noise_stddev, 1e-5, 60_000, 585, 0.25, 0.25)
    expected = [
        accounting.compute_epsilon(mechanism, CYCLIC, 585, 1e-5, "rdp"),
        accounting.compute_epsilon(mechanism, CYCLIC, 585, 1e-5, "pld"),
    ]
    for clip in (0.5, 0.25):
        dp_sgd = make_mechanism(
            l2_norm_clip=clip, error_norm_clip=0.0, noise_multiplier=2.85 * 0.25 / clip
        )
        sampling = PoissonSampling(60_000, 2048)
        expected += [
            accounting.compute_epsilon(dp_sgd, sampling, 585, 1e-5, accountant)
            for accountant in ("rdp", "pld")
        ]
    for epsilon in expected:
        assert f"{math.ceil(epsilon * 1000) / 1000:.3f}" in text
    for form in ("closed", "renyi"):
        assert f"{accounting.paper_epsilon(*arguments, form=form):.3f}" in text
    assert "closed form of the paper, not a guarantee" in squeezed(text)


def test_no_printed_number_is_below_the_true_one():
    epsilons = [*np.random.default_rng(0).lognormal(1, 3, 400), 0.0, 2.0, 1.001, 1e-9, 6.2e8, 1e40]
    for epsilon in epsilons:
        for delta in (1e-5, 0.1 / 14374, 0.99 / 60_000, 1e-300):
            text = str(PrivacyGuarantee(float(epsilon), delta, "replace_one", "rdp", 3))
            printed = [float(number) for number in text[1 : text.index(")")].split(", ")]
            assert epsilon <= printed[0] <= (epsilon + 0.001) * (1 + 1e-15)
            assert delta <= printed[1] <= 1.01 * delta
    assert str(PrivacyGuarantee(2.0, 1e-5, "replace_one", "rdp", 3)).startswith("(2.000, 1e-05)-")
    assert "(infinite, 0.1)-" in str(PrivacyGuarantee(math.inf, 0.1, "replace_one", "rdp", 3))
    delta = 1.2345644e-6
    text = accounting.privacy_statement(make_mechanism(), CYCLIC, 2, delta)
    printed = re.findall(r"delta = (\S+)\. ", squeezed(text))
    printed += re.findall(r"^  delta +(\S+)$", text, re.M)
    assert len(printed) == 2 and all(delta <= float(number) < 1.01 * delta for number in printed)


def test_sharp_edges_are_said():
    statement = lambda *args: squeezed(accounting.privacy_statement(*args))
    text = statement(make_mechanism(), CYCLIC, 585, 1e-5)
    for words in (
        "hyperparameter search",
        "metrics",
        "error variables",
        "not cryptographic",
        "Validation",
        "k examples of one person",
    ):
        assert words in text
    assert "NOT secret" not in text

    seeded = make_mechanism(noise_is_secret=False)
    assert "it is NOT secret" in statement(seeded, CYCLIC, 585, 1e-5)
    known = CyclicPoissonSampling(60_000, 2048, seed=1)
    assert "Draws came from a seed" in statement(make_mechanism(), known, 585, 1e-5)
    text = statement(make_mechanism(noise_multiplier=0.0), CYCLIC, 585, 1e-5)
    assert "there is NO privacy" in text and "epsilon = infinite" in text
    text = statement(make_mechanism(error_norm_clip=0.0), CYCLIC, 585, 1e-5)
    assert "this is DP-SGD" in text and "clipping to" not in text


def test_shuffled_epochs_and_microbatches_are_said():
    text = squeezed(
        accounting.privacy_statement(
            make_mechanism(100, num_microbatches=20), ShuffledEpochs(1000, 100), 25, 1e-4
        )
    )
    assert "no amplification, 3 rounds. An unfinished epoch at the end counts in full" in text
    assert "the sensitivity is doubled" in text and "doubled again" not in text
    assert "replace_by_empty" in text
    text = squeezed(
        accounting.privacy_statement(
            make_mechanism(100, num_microbatches=20), PoissonSampling(1000, 100), 25, 1e-4
        )
    )
    assert "Means of 5 examples are clipped" in text and "doubled again" in text
    assert "sensitivity C1 + C2" in text


def test_unbounded_residuals_and_another_relation_are_said():
    mechanism = make_mechanism(100, bound_residuals=False, error_norm_clip=1e-5)
    text = squeezed(
        accounting.privacy_statement(
            mechanism, PoissonSampling(1000, 100), 25, 1e-4, neighbouring_relation="replace_one"
        )
    )
    assert "every later step by 2 C2 = 2e-05" in text
    assert "one example is replaced by any other example (replace_one)" in text
    assert "clipping to C1 = 0.25" in text and "clipping to C1 + C2" not in text


def test_wrong_arguments_are_refused():
    with pytest.raises(AccountingError, match="delta"):
        accounting.privacy_statement(make_mechanism(), CYCLIC, 585, 1e-3)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
