# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The examples for several devices, on two logical CPUs: same training, same epsilon."""

import json
import math
import os
import pathlib
import re
import subprocess
import sys

from absl import flags
import numpy as np
import pytest

TESTS = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS.parent / "examples"))
sys.path.insert(0, str(TESTS))

from dp_accounting_oracle import TOLERANCE, composed_epsilon
import multi_gpu

NUM_DIGITS = 1437


def parse(*arguments):
    values = flags.FlagValues()
    multi_gpu.define_flags(values)
    values(["multi_gpu", *arguments])
    return values


def epsilon_of(batch_size, noise_multiplier, rounds, accountant="pld"):
    """Epsilon of two groups in turns with C1 = C2, by dp_accounting alone."""
    probability = 2 * batch_size / NUM_DIGITS
    return composed_epsilon(probability, noise_multiplier / math.sqrt(2), rounds, 1e-4, accountant)


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What `two_devices_scenario.py` printed, script by script."""
    process = subprocess.run(
        [sys.executable, str(TESTS / "two_devices_scenario.py"), tmp_path_factory.mktemp("tfds")],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
            "CUDA_VISIBLE_DEVICES": "-1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout.split("NEXT\n")


@pytest.mark.parametrize(
    ("arguments", "batch_size", "rounds"),
    [
        ((), 256, 120),
        (("--epsilon=3", "--batch_size=100", "--epochs=7"), 100, 49),
        (("--accountant=rdp",), 256, 120),
    ],
)
def test_epsilon_is_that_of_dp_accounting_on_any_number_of_devices(arguments, batch_size, rounds):
    settings = parse(*arguments)
    plan = multi_gpu.make_plan(settings, NUM_DIGITS)
    assert settings.epsilon - 0.01 < plan.epsilon() <= settings.epsilon
    expected = epsilon_of(batch_size, plan.noise_multiplier, rounds, settings.accountant)
    assert plan.epsilon() == pytest.approx(expected, rel=TOLERANCE[settings.accountant])


def test_script_trains_on_two_devices_and_reports(printed):
    printed = printed[0]
    plan = multi_gpu.make_plan(parse("--batch_size=481", "--epochs=2", "--epsilon=5"), NUM_DIGITS)
    assert str(plan) in printed and plan.steps == 4
    epsilon = float(re.search(r"^epsilon: (\S+) at delta=0.0001 after 4 steps$", printed, re.M)[1])
    assert epsilon == pytest.approx(epsilon_of(481, plan.noise_multiplier, 2), rel=1e-4)
    assert 4.9 < epsilon <= 5.0
    assert "2 device(s): " in printed
    assert "Expected batch: 481 images, 240.5 on each device." in printed
    throughput = re.search(r"^Throughput: (\d+) images per second on 2 device", printed, re.M)
    assert int(throughput[1]) > 0


def test_image_classifier_trains_the_same_on_two_devices(printed):
    printed = printed[1]
    assert "on 1 replica(s)" in printed and "on 2 replica(s)" in printed
    last = next(line for line in printed.splitlines() if line.startswith("RESULT "))
    one, two = (json.loads(last.removeprefix("RESULT "))[n] for n in ("default", "mirrored"))
    assert one["epsilon"] == two["epsilon"] and set(one) == set(two)
    for name, values in one.items():
        np.testing.assert_allclose(two[name], values, rtol=1e-4, err_msg=name)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
