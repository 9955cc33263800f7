# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether every step of this process had a draw of its own.

Marks tell that a sampler drew a batch, not that nobody had used it before. What a process
knows beyond is how many batches it drew, and which seeds drew them.
"""

import contextlib
import warnings

from dice_tf.errors import SamplingError
from dice_tf.ledger import admission, provenance
from dice_tf.sampling.state import SamplingState


@contextlib.contextmanager
def steps_of_fit(optimizer, found):
    """Context of a `fit`, whose batches are known to be drawn for it.

    What a callback trains on meanwhile may not be: steps without a draw count as those of a loop.

    Args:
        optimizer: A private optimizer.
        found: List of `admission.Source`s behind the data.
    """
    private = optimizer._private
    names = {provenance.sampling_name(source.sampling) for source in found}
    counts = admission.draw_counts(found)
    drawn_before = sum(map(sum, counts))
    began, outer = private.steps_here(), private.is_in_fit
    private.loop_steps_before += began - private.fit_ended_at
    private.fit_ended_at = began
    private.set_in_fit(True)
    try:
        yield
    finally:
        private.set_in_fit(outer)
        private.fit_ended_at = private.steps_here()
        if len(names) == 1:
            taken = private.fit_ended_at - began
            drawn = min(taken, sum(map(sum, counts)) - drawn_before)
            with SamplingState.lock:
                SamplingState.drawn_for_loops[names.pop()] -= drawn
            private.loop_steps_before += taken - drawn


def check_steps(optimizer, sampling):
    """Refuses amplification for steps on batches that were used before, in loops of one's own.

    Args:
        optimizer: A private optimizer that is built.
        sampling: The sampling that its run is accounted with.

    Raises:
        SamplingError: If there were more steps than draws, or a loop took batches of another
            assignment of examples to groups than that of `sampling`.
    """
    if not sampling.amplified:
        return
    private, name = optimizer._private, provenance.sampling_name(sampling)
    in_loop = 0 if private.is_in_fit else private.steps_here() - private.fit_ended_at
    steps = private.loop_steps_before + in_loop
    drawn = SamplingState.drawn_for_loops[name]
    if steps > drawn:
        raise SamplingError(
            f"Cannot claim privacy amplification by {sampling!r}: {steps} steps were taken outside "
            f"the data of `fit`, for which at most {drawn} batches were drawn, so some were used "
            "again: kept in a list, behind `cache()`, or trained on twice. Loop over "
            "`sampling.dataset(...)` itself in every epoch, and begin anew."
        )
    known = provenance.unpack_record(optimizer.sampling_record.numpy())["assignment"]
    other = known not in (-1, sampling.assignment) or in_loop > sampling.draws
    # `fit` begins with an error of 0 where groups are others.
    if sampling.num_groups > 1 and in_loop and other:
        raise SamplingError(
            f"Cannot account {in_loop} steps of a loop by this object, {sampling!r}: not all of "
            "their batches are its own, and another object has other groups, so an example may "
            "enter twice in a row. Make one sampling object, before the loop, and ask for epsilon "
            "with it."
        )


def check_seed(optimizer, sampling):
    """Refuses a sampler that would repeat the draws of another one with its seed.

    To be called when a `fit` begins.

    Args:
        optimizer: A private optimizer.
        sampling: The object that draws the steps that follow.

    Raises:
        SamplingError: If an object with the same parameters and seed drew steps of this run, and
            this one has not come as far.
    """
    if not sampling.amplified or sampling.seed is None:
        return
    private, steps = optimizer._private, int(optimizer.iterations.numpy())
    other, began = private.seeded.get(sampling, (sampling, steps))
    if other is not sampling and began < steps and sampling.position < other.position:
        raise SamplingError(
            f"Steps of this run were drawn by another object with this seed, {sampling!r}: the "
            "same batches would come again, in which an example counts double. Go on with that "
            "object, leave `seed` out, or take another one."
        )
    if other is not sampling or sampling not in private.seeded:
        private.seeded[sampling] = sampling, steps
        _warn_of_loaded_seeds(optimizer, sampling)


def _warn_of_loaded_seeds(optimizer, sampling):
    if not optimizer.built or optimizer._private.steps_here() or sampling.position:
        return
    record = provenance.unpack_record(optimizer.sampling_record.numpy())
    if provenance.draws_were_seeded(record):
        warnings.warn(
            "Steps of this run were drawn from a seed before they were loaded, and this sampler "
            "begins with the first draws of its seed. If it is the same seed, the same batches "
            "come again, and epsilon is too small: leave `seed` out, or take another one. "
            f"Received: {sampling!r}.",
            stacklevel=2,
        )
