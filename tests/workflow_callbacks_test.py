# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/saving.md, "With the usual callbacks": all at once, and killed by SIGKILL in the middle.

With `--run` this file is what a reader would write, in the folder where it is started.
"""

import concurrent.futures
import csv
import json
import os
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).absolute().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
PAGE = (ROOT / "docs" / "saving.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
STEPS = 4 * 20


def program():
    """Returns the code of the page, made to tell its steps and to be repeatable."""
    first, all_callbacks, *_ = BLOCKS
    setup = first[: first.index("model = make_model")]
    # Two runs are compared to the last bit, so that they need the same noise and draws.
    seeded = {
        "save_errors=save_errors)": "save_errors=save_errors, noise_seed=1)",
        "expected_batch_size=100)\nbudget": "expected_batch_size=100, seed=2)\nbudget",
        "double_checkpoint=True),\n]": "double_checkpoint=True),\n    Tell(),\n]",
    }
    code = setup + all_callbacks
    for theirs, ours in seeded.items():
        assert code.count(theirs) == 1, theirs
        code = code.replace(theirs, ours)
    return code


def run_in_this_process():
    import warnings

    import keras
    import numpy as np

    class Tell(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            print(int(self.model.optimizer.iterations), flush=True)

    warnings.simplefilter("ignore")
    keras.utils.set_random_seed(0)
    keras.utils.disable_interactive_logging()
    labels = np.random.default_rng(0).integers(0, 4, 2200)
    features = np.eye(4, dtype="float32")[labels]
    names = dict(x=features[:2000], y=labels[:2000], Tell=Tell)
    names.update(x_val=features[2000:], y_val=labels[2000:])
    exec(program(), names)
    model, budget = names["model"], names["budget"]
    result = {
        "weights": b"".join(v.numpy().tobytes() for v in model.weights).hex(),
        "steps": int(model.optimizer.iterations),
        "accounted": budget.accounted_steps(),
        "epsilon": budget.epsilon(),
    }
    print(json.dumps(result), flush=True)


def start(folder, kill_at=None):
    import killed_run

    folder.mkdir(exist_ok=True)
    environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3", KERAS_BACKEND="tensorflow")
    # Sums of three tensors may otherwise differ in the last bit.
    environment["TF_NUM_INTEROP_THREADS"] = environment["TF_NUM_INTRAOP_THREADS"] = "1"
    command = [sys.executable, __file__, "--run"]
    return killed_run.finish(command, kill_at, cwd=folder, env=environment)


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """The folder and the end of a run that was killed and restarted, and of one that was not."""
    killed, whole = (tmp_path_factory.mktemp(name) for name in ("killed", "whole"))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        undisturbed = pool.submit(start, whole)
        start(killed, kill_at=47)
        assert (killed / "backup_of_all" / "latest.weights.h5").exists()
        return killed, start(killed), whole, undisturbed.result()


def test_a_killed_run_ends_like_one_that_was_not(ends):
    _, end, _, undisturbed = ends
    assert end == undisturbed
    assert end["steps"] == end["accounted"] == STEPS


def test_epsilon_is_that_of_the_whole_run(ends):
    import dice_tf
    from dice_tf import accounting

    _, end, _, _ = ends
    sampling = dice_tf.CyclicPoissonSampling(num_examples=2000, expected_batch_size=100)
    mechanism = dice_tf.DiceMechanism(
        l2_norm_clip=0.5, noise_multiplier=1.0, expected_batch_size=100
    )
    assert end["epsilon"] == accounting.compute_epsilon(mechanism, sampling, STEPS, 1e-5)


def test_logs_have_every_epoch_and_its_epsilon(ends):
    killed, end, whole, _ = ends
    rows = {}
    for folder in (killed, whole):
        with open(folder / "log.csv", encoding="utf-8") as file:
            rows[folder] = list(csv.DictReader(file))
        assert [row["epoch"] for row in rows[folder]] == ["0", "1", "2", "3"]
        assert float(rows[folder][-1]["epsilon"]) == end["epsilon"]
        assert (folder / "tensorboard" / "train").exists()
    assert rows[killed] == rows[whole]


@pytest.mark.filterwarnings("ignore:This file holds the error")
def test_the_best_model_is_private_and_its_backup_is_gone(ends, tmp_path):
    import keras

    import dice_tf

    killed, _, _, _ = ends
    best = keras.models.load_model(killed / "best.keras")
    assert type(best.optimizer) is dice_tf.DiceSGDOptimizer and best.optimizer.save_errors
    assert 0 < int(best.optimizer.iterations) <= STEPS
    assert not (killed / "backup_of_all" / "latest.weights.h5").exists()
    # The page's way to publish it.
    release = BLOCKS[2].replace("released.keras", str(tmp_path / "released.keras"))
    exec(release, {"model": best})
    assert not keras.models.load_model(tmp_path / "released.keras").optimizer.save_errors


if __name__ == "__main__" and sys.argv[1:] == ["--run"]:
    run_in_this_process()
    sys.exit()

if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
