# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""Prints the privacy statement of a planned or finished run.

    python -m dice_tf.accounting --num_examples=60000 --batch_size=2048 --epochs=20 \
        --l2_norm_clip=0.25 --target_epsilon=2.7 --delta=1e-5
"""

import sys

from absl import app, flags

from dice_tf import sampling as sampling_lib
from dice_tf.accounting.calibration import calibrate_noise_multiplier
from dice_tf.accounting.epsilon import ACCOUNTANTS
from dice_tf.accounting.statement import privacy_statement
from dice_tf.errors import DicePrivacyError
from dice_tf.mechanism import DiceMechanism

_NUM_EXAMPLES = flags.DEFINE_integer("num_examples", None, "Size N of the data set.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", None, "Expected batch size B.")
_STEPS = flags.DEFINE_integer("steps", None, "Number of optimizer steps; or give epochs.")
_EPOCHS = flags.DEFINE_integer("epochs", None, "Number of epochs; or give steps.")
_L2_NORM_CLIP = flags.DEFINE_float("l2_norm_clip", 1.0, "Clipping threshold C1.")
_ERROR_NORM_CLIP = flags.DEFINE_float(
    "error_norm_clip", None, "Threshold C2; l2_norm_clip if not given, 0 for DP-SGD."
)
_NOISE_MULTIPLIER = flags.DEFINE_float(
    "noise_multiplier", None, "Noise on the sum over l2_norm_clip; or give target_epsilon."
)
_TARGET_EPSILON = flags.DEFINE_float("target_epsilon", None, "Epsilon to find the noise for.")
_DELTA = flags.DEFINE_float("delta", None, "Delta, below 1/N.")
_SAMPLING = flags.DEFINE_enum(
    "sampling", "cyclic", ["poisson", "cyclic", "shuffled"], "How batches are drawn."
)
_NUM_GROUPS = flags.DEFINE_integer("num_groups", 2, "Number of groups of cyclic sampling.")
_BOUND_RESIDUALS = flags.DEFINE_bool(
    "bound_residuals", True, "Clip each residual; false is Alg. 1 of the paper to the letter."
)
_FEEDBACK_STEPS = flags.DEFINE_integer(
    "feedback_steps", 1, "Over how many later steps a residual is fed back."
)
_ACCOUNTANT = flags.DEFINE_enum(
    "accountant", "rdp", list(ACCOUNTANTS), "Accountant of the epsilon, given or stated."
)
_GROUP_SIZE = flags.DEFINE_integer(
    "group_size", 1, "State also what holds for a person with up to so many examples."
)


def _statement():
    sizes = dict(num_examples=_NUM_EXAMPLES.value, expected_batch_size=_BATCH_SIZE.value)
    if _SAMPLING.value == "cyclic":
        sampling = sampling_lib.CyclicPoissonSampling(**sizes, num_groups=_NUM_GROUPS.value)
    elif _SAMPLING.value == "poisson":
        sampling = sampling_lib.PoissonSampling(**sizes)
    else:
        sampling = sampling_lib.ShuffledEpochs(**sizes)
    steps = _STEPS.value if _EPOCHS.value is None else sampling.steps(_EPOCHS.value)
    parameters = dict(
        l2_norm_clip=_L2_NORM_CLIP.value,
        error_norm_clip=_ERROR_NORM_CLIP.value,
        bound_residuals=_BOUND_RESIDUALS.value,
        feedback_steps=_FEEDBACK_STEPS.value,
    )
    noise_multiplier = _NOISE_MULTIPLIER.value
    if noise_multiplier is None:
        noise_multiplier = calibrate_noise_multiplier(
            _TARGET_EPSILON.value,
            _DELTA.value,
            sampling,
            steps,
            accountant=_ACCOUNTANT.value,
            **parameters,
        )
    mechanism = DiceMechanism(
        noise_multiplier=noise_multiplier, expected_batch_size=_BATCH_SIZE.value, **parameters
    )
    return privacy_statement(
        mechanism,
        sampling,
        steps,
        _DELTA.value,
        accountant=_ACCOUNTANT.value,
        group_size=_GROUP_SIZE.value,
    )


def main(argv):
    """Prints the statement; an argument out of range is an error message, not a traceback."""
    if len(argv) > 1:
        raise app.UsageError(f"Unexpected arguments: {argv[1:]}.")
    try:
        print(_statement())
    except DicePrivacyError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    flags.mark_flags_as_required(["num_examples", "batch_size", "delta"])
    flags.mark_flags_as_mutual_exclusive(["steps", "epochs"], required=True)
    flags.mark_flags_as_mutual_exclusive(["noise_multiplier", "target_epsilon"], required=True)
    app.run(main)
