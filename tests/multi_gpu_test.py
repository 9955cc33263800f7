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
import dp_accounting
from dp_accounting import rdp
import numpy as np
import pytest

TESTS = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS.parent / "examples"))

import multi_gpu
import private_run

NUM_DIGITS = 1437


def parse(*arguments):
    values = flags.FlagValues()
    multi_gpu.define_flags(values)
    values(["multi_gpu", *arguments])
    return values


def epsilon_of(printed):
    """Epsilon from printed parameters, by dp_accounting alone."""
    number = lambda name: float(printed[name])
    sensitivity = math.hypot(number("l2_norm_clip"), number("error_norm_clip"))
    noise = number("noise_stddev") * number("expected_batch_size") / sensitivity
    groups = number("num_groups")
    event = dp_accounting.PoissonSampledDpEvent(
        groups * number("expected_batch_size") / number("num_examples"),
        dp_accounting.GaussianDpEvent(noise),
    )
    orders = np.concatenate([1 + np.arange(1, 100) / 10, np.arange(11, 64)])
    accountant = rdp.RdpAccountant(orders).compose(event, math.ceil(number("steps") / groups))
    return accountant.get_epsilon(number("delta"))


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


@pytest.mark.parametrize("arguments", [(), ("--epsilon=3", "--batch_size=100", "--epochs=7")])
def test_epsilon_is_that_of_dp_accounting_on_any_number_of_devices(arguments):
    settings = parse(*arguments)
    parameters = private_run.privacy_parameters(multi_gpu.make_plan(settings, NUM_DIGITS))
    assert settings.epsilon - 0.01 < parameters["epsilon"] <= settings.epsilon
    assert parameters["epsilon"] == pytest.approx(epsilon_of(parameters), rel=1e-9)


def test_script_trains_on_two_devices_and_reports(printed):
    printed = printed[0]
    parameters = dict(re.findall(r"^  (\w+): (.+)$", printed, re.MULTILINE))
    assert (parameters["expected_batch_size"], parameters["steps"]) == ("481", "4")
    assert float(parameters["epsilon"]) == pytest.approx(epsilon_of(parameters), rel=1e-9)
    assert 4.9 < float(parameters["epsilon"]) <= 5.0
    assert "2 device(s): " in printed
    assert "Expected batch: 481 images, 240.5 on each device." in printed
    throughput = re.search(r"^Throughput: (\d+) images per second on 2 device", printed, re.M)
    assert int(throughput[1]) > 0
    assert f"epsilon: {parameters['epsilon']} at delta=0.0001 after 4 steps" in printed


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
