# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The code blocks of docs/recipes.md, by name."""

import pathlib
import re

_ROOT = pathlib.Path(__file__).absolute().parents[1]
_PAGE = (_ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")


def recipe(name):
    """Returns the code that the page shows under a name."""
    (code,) = re.findall(rf"<!-- recipe: {name} -->\n```python\n(.*?)```", _PAGE, re.DOTALL)
    return code
