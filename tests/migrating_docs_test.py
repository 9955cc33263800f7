# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/migrating.md: its code runs, before and after, and its numbers are what both sides say."""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest

import dice_tf
from dice_tf import accounting

ROOT = pathlib.Path(__file__).absolute().parents[1]
PAGE = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"<!-- (?:run|read): (\w+) -->\n```python\n(.*?)```", PAGE, flags=re.DOTALL)
AVAILABLE = importlib.util.find_spec("tensorflow_privacy") is not None

DP_SGD = dice_tf.DiceMechanism(
    l2_norm_clip=1.0, noise_multiplier=1.1, expected_batch_size=250, error_norm_clip=0
)


def blocks_of(library):
    return [block for name, block in BLOCKS if name == library]


def stated_values(block):
    """The numbers in comments behind prints."""
    return [float(text) for text in re.findall(r"^print\(.*# ([\d.]+\d)", block, re.MULTILINE)]


def needs_tf_privacy(test):
    # Python 3.12 and later have no TF-Privacy, so this page is not for them.
    return test if AVAILABLE else None


def make_data():
    random = np.random.default_rng(0)
    y = random.integers(0, 4, 10_000)
    return np.eye(4, dtype="float32")[y] + random.normal(size=(10_000, 4)).astype("float32") / 4, y


def test_every_block_is_run_or_marked_as_foreign():
    assert PAGE.count("```python") == len(BLOCKS)
    assert [len(blocks_of(n)) for n in ("dice_tf", "tf_privacy", "opacus", "jax_privacy")] == [
        7, 5, 1, 1
    ]  # fmt: skip
    for name in ("opacus", "jax_privacy"):
        assert "dice_tf" not in blocks_of(name)[0]


def test_the_blocks_of_dice_tf_run_as_written(capsys):
    keras.utils.set_random_seed(0)
    x, y = make_data()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(10, activation="softmax")])
    names = {"model": model, "x": x, "y": y}
    for block in blocks_of("dice_tf"):
        capsys.readouterr()
        exec(block, names)  # The reader's own lines, from our own page.
        printed = re.findall(r"^[\d.]+$", capsys.readouterr().out, re.MULTILINE)
        assert [float(line) for line in printed] == stated_values(block)
        if "callbacks" in block:
            history = names["model"].history.history
            target = 2.0 if "target_epsilon=2.0" in block else 2.2033
            assert 0.95 * target < history["epsilon"][-1] <= target
    # The last block turned error feedback on.
    assert names["optimizer"].mechanism.error_norm_clip == 0.5
    assert len(names["optimizer"].errors) == 2 and history["accuracy"][-1] > 0.9


# Runs in a process of its own, where tf.keras is Keras 2 and keras is Keras 3.
TF_PRIVACY = """
import json, sys
import keras
import numpy as np
import tensorflow as tf
import dice_tf
from dp_accounting.rdp import rdp_privacy_accountant

blocks, (x, y) = json.load(sys.stdin), np.load(sys.argv[1]).values()
make_model = lambda: tf.keras.Sequential(
    [tf.keras.layers.Dense(10, activation="softmax", input_shape=(4,))])
names = {"model": make_model(), "x": x, "y": y}
names["rounds"] = 10 * [()] + [[[tf.ones([4, 10]), tf.ones([10])]]]
epsilons = []
for block in blocks:
    exec(block, names)
    if "ledger" in names:
        event = names["ledger"].build()
        epsilons.append(rdp_privacy_accountant.RdpAccountant().compose(event).get_epsilon(1e-5))
        shapes = [total.shape for total in names["total"]]
        assert shapes == [[4, 10], [10]], shapes
# TF-Privacy's own events are float32 tensors, and so is what is computed from them.
assert np.isclose(*epsilons, rtol=2e-5), epsilons
assert type(names["query"]).__name__ == "DiceSumQuery"

theirs, weights = make_model(), []
start = theirs.get_weights()
theirs.compile(
    names["dp_optimizer_keras"].DPKerasSGDOptimizer(
        l2_norm_clip=0.3, noise_multiplier=0.0, num_microbatches=250, learning_rate=0.5),
    tf.keras.losses.SparseCategoricalCrossentropy(reduction=tf.losses.Reduction.NONE))
ours = keras.Sequential([keras.Input((4,)), keras.layers.Dense(10, activation="softmax")])
ours.set_weights(start)
ours.compile(
    dice_tf.DiceSGDOptimizer(
        0.5, l2_norm_clip=0.3, noise_multiplier=0.0, expected_batch_size=250, error_norm_clip=0),
    "sparse_categorical_crossentropy")
for model in (theirs, ours):
    model.train_on_batch(x[:250], y[:250])
    weights.append(np.concatenate([np.ravel(w) for w in model.get_weights()]))
np.testing.assert_allclose(*weights, atol=1e-6)
assert np.abs(weights[0] - np.concatenate([np.ravel(w) for w in start])).max() > 1e-2
"""


@needs_tf_privacy
def test_the_blocks_of_tf_privacy_run_and_agree(tmp_path):
    x, y = make_data()
    # Few steps: what is printed does not depend on the data.
    np.savez(tmp_path / "data.npz", x=x[:500], y=y[:500])
    run = subprocess.run(
        [sys.executable, "-c", TF_PRIVACY, str(tmp_path / "data.npz")],
        input=json.dumps(blocks_of("tf_privacy")),
        env={**os.environ, "TF_USE_LEGACY_KERAS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    # Its statement has both of the numbers that section 1 quotes.
    for sampling in (dice_tf.ShuffledEpochs, dice_tf.PoissonSampling):
        epsilon = accounting.compute_epsilon(DP_SGD, sampling(10_000, 250), 200, 1e-5)
        assert re.search(rf"Epsilon .*: +{epsilon:.3f}\n", run.stdout), run.stdout
        assert f"{epsilon:.2f}" in PAGE


def test_the_foreign_numbers_are_ours():
    # They were measured with these packages; here they are held against our accountant.
    (opacus,), (jax_privacy,) = (stated_values(blocks_of(n)[0]) for n in ("opacus", "jax_privacy"))
    sampling = dice_tf.PoissonSampling(10_000, 250)
    assert f"{accounting.compute_epsilon(DP_SGD, sampling, 200, 1e-5):.4f}" == f"{opacus:.4f}"
    calibrated = accounting.calibrate_noise_multiplier(
        2.0, 1e-5, sampling, 200, error_norm_clip=0, accountant="pld"
    )
    assert f"1.152, as in Opacus; {calibrated:.3f} with" in PAGE
    assert calibrated == pytest.approx(jax_privacy, rel=3e-3)


def test_the_table_of_noise():
    (text,) = re.findall(r"<!-- table: noise -->\n((?:\|.*\n)+)", PAGE)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    samplings = {
        name: getattr(dice_tf, name)(10_000, 250)
        for name in ("PoissonSampling", "CyclicPoissonSampling")
    }
    assert len(rows) == 5
    for label, c1, c2, noise_multiplier, noise in rows[2:]:
        sampling = samplings[re.search(r"`(\w+)`", label)[1]]
        calibrated = accounting.calibrate_noise_multiplier(
            2.2032, 1e-5, sampling, 200, l2_norm_clip=float(c1), error_norm_clip=float(c2)
        )
        assert f"{calibrated:.3f}" == noise_multiplier
        assert f"{calibrated * float(c1):.3f}" == noise


def test_names_and_links_exist():
    for name in re.findall(r"\bdice_tf\.(\w+)", PAGE):
        assert hasattr(dice_tf, name) or name == "tf_privacy", name
    for name in re.findall(r"\baccounting\.(\w+)", PAGE):
        assert hasattr(accounting, name), name
    for link in re.findall(r"\]\((\w+\.md)#", PAGE):
        assert (ROOT / "docs" / link).is_file()
    slug = lambda title: re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
    pages = PAGE + (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
    headings = {slug(title) for title in re.findall(r"^#+ (.*)$", pages, re.MULTILINE)}
    assert set(re.findall(r"#([\w-]+)\)", PAGE)) <= headings


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
