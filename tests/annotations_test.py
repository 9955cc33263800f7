# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Every public function says the types of its arguments and of its result.

`py.typed` promises that to type checkers, which then flag `noise_multiplier="two"`.
"""

import inspect

import pytest

import dice_tf
from dice_tf import accounting, auditing, engine
from dice_tf.auditing import canaries


def public_functions():
    """Returns pairs of a dotted name and a function that users call."""
    found = {}
    modules = {
        "dice_tf": (dice_tf, dice_tf.__all__),
        "accounting": (accounting, accounting.__all__),
        "per_example": (engine, engine.__all__),
    }
    for module in (auditing, canaries):
        own = [
            n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__
        ]
        modules[module.__name__] = module, [name for name in own if not name.startswith("_")]
    for prefix, (module, names) in modules.items():
        for name in names:
            value = getattr(module, name)
            if inspect.isclass(value):
                # Optimizers of Keras and NamedTuples inherit what they do not define.
                for member in (c.__dict__.get("__init__") for c in value.__mro__[:-1]):
                    if inspect.isfunction(member):
                        found[f"{prefix}.{name}"] = member
                        break
            elif callable(value):
                found[f"{prefix}.{name}"] = inspect.unwrap(value)
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
    assert {"dice_tf.DiceAdamOptimizer", "accounting.compute_epsilon"} <= set(FUNCTIONS)


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


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
