# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every public function says the types of its arguments and of its result.

`py.typed` promises that to type checkers, which then flag `noise_multiplier="two"`.
"""

import importlib
import inspect
import pkgutil

import pytest

import dice_tf
from dice_tf import auditing, errors, tf_privacy

# What users import names from. Every other package is for these, and exports nothing.
PUBLIC = (
    dice_tf,
    dice_tf.accounting,
    auditing,
    auditing.canaries,
    dice_tf.engine,
    errors,
    dice_tf.mechanism,
    dice_tf.plan,
    dice_tf.sampling,
    dice_tf.search,
    tf_privacy,
)


def modules():
    """Returns `dice_tf` and all modules in it."""
    found = [m for m in pkgutil.walk_packages(dice_tf.__path__, "dice_tf.")]
    names = [m.name for m in found if not m.name.endswith("__main__")]
    return [dice_tf, *map(importlib.import_module, names)]


MODULES = modules()


def defined_in(module):
    """Returns the names of the functions and classes that `module` exports and defines."""
    return [n for n in module.__all__ if getattr(getattr(module, n), "__module__", "") ==
            module.__name__]  # fmt: skip


def public_functions():
    """Returns pairs of a dotted name and a function that users call."""
    found = {}
    for module in MODULES:
        for name in defined_in(module) if hasattr(module, "__all__") else ():
            value, name = getattr(module, name), f"{module.__name__}.{name}"
            if inspect.isclass(value):
                # Optimizers of Keras and NamedTuples inherit what they do not define.
                for member in (c.__dict__.get("__init__") for c in value.__mro__[:-1]):
                    if inspect.isfunction(member):
                        found[name] = member
                        break
            elif callable(value):
                found[name] = inspect.unwrap(value)
    for owner, names in {
        dice_tf.PrivacyPlan: "dataset callback epsilon statement mechanism signal_to_noise steps",
        dice_tf.EpsilonCallback: "epsilon accounted_steps statement",
        dice_tf.PoissonSampling: "dataset steps rounds separates_entries steps_per_epoch draws",
        dice_tf.DiceMechanism: "sensitivity noise_stddev noise_stddev_of_sum divisor",
        dice_tf.DiceSGDOptimizer: "mechanism errors sampling_record get_config",
    }.items():
        for name in names.split():
            member = inspect.getattr_static(owner, name)
            function = member.fget if isinstance(member, property) else member
            found[f"{owner.__name__}.{name}"] = function
    return found


FUNCTIONS = public_functions()


def test_public_functions_are_found():
    assert len(FUNCTIONS) > 45
    expected = {"training.optimizers.DiceAdamOptimizer", "accounting.epsilon.compute_epsilon"}
    assert {f"dice_tf.{name}" for name in expected} <= set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_and_result_have_types(name):
    signature = inspect.signature(FUNCTIONS[name])
    bare = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.annotation is inspect.Parameter.empty and parameter.name != "self"
    ]
    assert not bare, f"{name} has arguments without a type: {bare}"
    # That of a constructor made by `dataclass` is None.
    assert signature.return_annotation is not inspect.Signature.empty, name


def test_every_package_says_what_it_exports():
    packages = [module for module in MODULES if hasattr(module, "__path__")]
    assert len(packages) > 10
    assert [m.__name__ for m in packages if not hasattr(m, "__all__")] == []
    exporting = {m.__name__ for m in packages if m.__all__}
    assert exporting == {m.__name__ for m in PUBLIC if hasattr(m, "__path__")}


def test_every_module_of_a_public_name_exports_it():
    # The names that come out of the package, and the modules that say so: nothing is exported
    # by a module alone, and no name by its package alone.
    public, defining = set(), set()
    for module in MODULES:
        for name in defined_in(module) if hasattr(module, "__all__") else ():
            defining.add((module.__name__, name))
    for module in PUBLIC:
        assert hasattr(module, "__all__"), module.__name__
        for name in module.__all__:
            home = getattr(getattr(module, name), "__module__", None)
            if home is not None:
                public.add((home, name))
    assert public == defining and len(public) > 55


@pytest.mark.parametrize("module", [m for m in MODULES if hasattr(m, "__all__")])
def test_exported_names_are_there_and_sorted(module):
    names = module.__all__
    assert len(set(names)) == len(names) and [n for n in names if not hasattr(module, n)] == []
    # Constants, classes, functions, as ruff sorts them.
    kind = lambda name: 0 if name.isupper() else 1 if name[0].isupper() else 2
    assert list(names) == sorted(names, key=lambda name: (kind(name), name))
    assert [n for n in names if n.startswith("_") and n != "__version__"] == []


@pytest.mark.parametrize("module", PUBLIC)
def test_what_looks_public_in_a_module_of_users_is(module):
    """Without this, a new error or canary could be defined and left out of `__all__`."""
    own = [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
    ]
    assert set(own) - {"ag_pass_through"} <= set(module.__all__)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
