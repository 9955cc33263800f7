# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/saving.md: its code runs as written, and a second start goes on where the first stopped."""

import pathlib
import re

import keras
import numpy as np
import pytest

import dice_tf

PAGE = (pathlib.Path(__file__).parents[1] / "docs" / "saving.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.filterwarnings("ignore:This file holds the error")
def test_the_code_runs_as_written_and_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    keras.utils.set_random_seed(0)
    y = np.random.default_rng(0).integers(0, 4, 2000)
    names = dict(dice_tf=dice_tf, keras=keras, x=np.eye(4, dtype="float32")[y], y=y)
    backup, _, released, loaded, further, loop = BLOCKS  # `workflow_callbacks_test` has the other.

    class Cut(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations) == 25:
                raise KeyboardInterrupt

    # The reader's own lines, from our own page: first cut short, then whole.
    with pytest.raises(KeyboardInterrupt):
        exec(backup.replace("backup])", "backup, Cut()])"), {**names, "Cut": Cut})
    assert pathlib.Path("private_backup/latest.weights.h5").exists()
    exec(backup, names)
    assert int(names["model"].optimizer.iterations) == names["budget"].accounted_steps() == 60
    assert len(names["model"].history.epoch) == 2
    exec(released, names)
    exec(loaded, names)
    later = dict(names)
    exec(further, later)
    # The steps before are in the count, and in what the budget allows.
    assert 60 < int(later["model"].optimizer.iterations) == later["budget"].accounted_steps()
    assert names["budget"].epsilon() < later["budget"].epsilon() <= 12.0
    capsys.readouterr()
    exec(loop.replace("steps = sampling.steps(epochs=3)", "steps = 25"), dict(names))
    exec(loop, names)
    assert int(names["model"].optimizer.iterations) == 60
    epsilons = [float(line) for line in re.findall(r"^[0-9.]+$", capsys.readouterr().out, re.M)]
    assert epsilons[-1] == names["budget"].epsilon()
    # The second start took the sampler of the first.
    assert names["sampling"].position >= 60


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
