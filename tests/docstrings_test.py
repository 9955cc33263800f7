# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every example in a docstring runs and prints what it says."""

import doctest
import importlib.util
import pkgutil

import pytest

import dice_tf

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(dice_tf.__path__, "dice_tf.")
    if not module.name.endswith("__main__")
    # Importable where TF-Privacy is, so up to Python 3.11.
    and (module.name != "dice_tf.tf_privacy" or importlib.util.find_spec("tensorflow_privacy"))
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0


def test_public_names_are_documented_with_an_example():
    public = [getattr(dice_tf, name) for name in dice_tf.__all__ if name != "__version__"]
    for item in public:
        assert item.__doc__, item
        if callable(item):
            assert "Example:" in item.__doc__, f"{item.__name__} has no example"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
