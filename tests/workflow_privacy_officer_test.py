# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/auditing.md as written: a statement, the same from the command line, and an audit."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import keras
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).absolute().parents[1]
PAGE = (ROOT / "docs" / "auditing.md").read_text(encoding="utf-8")
STATEMENT, AUDIT, BROKEN = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
(COMMAND,) = re.findall(r"```\n(python -m .*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture(scope="module")
def names():
    """What the first block defines and prints."""
    keras.utils.set_random_seed(0)
    y = np.random.default_rng(0).integers(0, 4, 400)
    names = dict(x=np.eye(4, dtype="float32")[y], y=y, printed=[])
    names["print"] = lambda value: names["printed"].append(str(value))
    # The reader's own lines, from our own page.
    exec(STATEMENT, names)
    return names


def test_the_command_line_says_what_the_callback_said(names):
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path]))
    command = [sys.executable, *shlex.split(COMMAND.replace("\\\n", " "))[1:]]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    (statement,) = names["printed"]
    assert done.stdout.strip() == statement.strip() == names["budget"].statement().strip()
    # The guarantee is the smaller one of both accountants.
    claimed = float(re.search(r"with epsilon =\s+([0-9.]+)", statement)[1])
    assert claimed <= names["budget"].epsilon() + 1e-3
    assert re.search(r"steps T\s+40\n", statement)


@pytest.mark.filterwarnings("ignore:The best Renyi order")
def test_an_audit_stays_below_the_statement_and_refutes_a_false_one(names):
    exec(AUDIT, names)
    reported, bound = names["train"].reported, names["result"].epsilon_lower_bound
    assert 0 <= bound <= reported < 2.0
    exec(BROKEN, names)
    # With hardly any noise nearly all coins are guessed: more than the statement allows.
    assert names["broken"].epsilon_lower_bound > reported
    assert len(names["broken"].scores_in) + len(names["broken"].scores_out) == 100
    assert [text[:10] for text in names["printed"][1:]] == ["epsilon >=", "epsilon >="]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
