# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What is claimed of a run, its mechanism and its sampling, against what its record shows."""

from dice_tf.errors import AccountingError, SamplingError
from dice_tf.ledger import provenance, row_counts, units


def check_steps(optimizer, sampling):
    """Returns how many steps epsilon counts, once the record of a run was found to back them.

    Args:
        optimizer: A private optimizer.
        sampling: The object that the run is accounted with.

    Returns:
        Int: the steps made so far, and those that passes lack that were cut short.

    Raises:
        SamplingError: If the steps contradict the sampling.
    """
    record = provenance.read_record(optimizer)
    if optimizer.built:
        largest = 0 if sampling.amplified else row_counts.largest_batch(optimizer)
        check_record(record, int(optimizer.iterations.numpy()), sampling, largest)
        if not sampling.amplified:
            row_counts.check(optimizer, sampling)
    return record["steps"] + record["unfinished_steps"]


def check_mechanism(optimizer):
    """Refuses to account steps that were made with other privacy parameters.

    Args:
        optimizer: A private optimizer.

    Raises:
        AccountingError: If some steps had another one.
        SamplingError: If its units have several rows, and steps were on batches of no sampler.
    """
    seen, mechanism = provenance.read_record(optimizer), optimizer.mechanism
    if seen["steps"] and seen["mechanism"] != provenance.mechanism_name(mechanism):
        raise AccountingError(
            f"Some of the {seen['steps']} steps of this optimizer were made with other privacy "
            "parameters and loaded into it: one epsilon cannot count both. Received: "
            f"noise_multiplier={mechanism.noise_multiplier:g}, "
            f"l2_norm_clip={mechanism.l2_norm_clip:g}. Compile the model with a new optimizer, "
            "and compose both trainings: `accounting.compose_epsilon([(mechanism, sampling, "
            "steps), ...], delta)`."
        )
    # Steps of loops on batches without a mark are among the disordered ones.
    units.check_steps(mechanism, min(seen["loop_steps"], seen["disordered_steps"]))


def check_record(seen, iterations, sampling, largest_batch=0):
    """Refuses a claim about the sampling that the steps of a run do not back.

    Args:
        seen: The fields of the record kept by the train step.
        iterations: Int, number of steps the run has made.
        sampling: The sampling object that the run is accounted with.
        largest_batch: Int, the largest number of rows of one step, as far as it is known.

    Raises:
        SamplingError: If the record is of another number of steps, or of a sampling with
            other parameters; if amplification is claimed and a step was unmarked, batches
            came out of order, or they came from a sampler with another number of groups;
            or if none is claimed and a Poisson sampler drew batches, or steps were made
            outside `fit` and are not each counted as an epoch.
    """
    if seen["steps"] != iterations:
        raise SamplingError(
            f"Cannot account the run by {sampling!r}: `optimizer.iterations` is {iterations}, but "
            f"{seen['steps']} steps were recorded, and each of them counts. Somebody assigned "
            "`iterations`, or loaded a part of an optimizer. Go on with the optimizer that began "
            "the run; `keras.callbacks.LearningRateScheduler` restarts a schedule without "
            "assigning `iterations`."
        )
    if sampling.amplified:
        _check_amplification(seen, iterations, sampling)
        if sampling.whole_epochs and seen["loop_steps"]:
            raise SamplingError(
                f"Cannot account the run by {sampling!r}: {seen['loop_steps']} of {iterations} "
                "steps were made outside `fit`, where nobody sees that epochs are whole. Begun "
                "epochs count in full. Give `fit` the data, or loop over a "
                "`CyclicPoissonSampling`, whose epochs may be cut."
            )
    elif seen["largest_group"] >= 0:
        raise SamplingError(
            f"Cannot account the run by {sampling!r}: it used batches of a Poisson sampler, "
            "which may draw an example several times in one epoch. Use one sampling object "
            "for the data set and for the accounting, from the first step of a run to its last."
        )
    elif sampling.steps_per_epoch == 1:
        # Every step counts as an epoch, so their batches may have been any.
        return
    elif seen["loop_steps"]:
        size = sampling.expected_batch_size
        fits = largest_batch <= size
        made = (
            f"For steps already made, `ShuffledEpochs({size}, {size})` counts each as an epoch; "
            "keep delta below 1/N of the data."
            if fits
            else f"Steps of {largest_batch} rows have no epsilon: take at most {size}."
        )
        raise SamplingError(
            f"Cannot account the run by {sampling!r}: {seen['loop_steps']} of {iterations} steps "
            "were made outside `fit`, where nobody sees that an epoch shows each example once. "
            "Give `fit` the data, or loop over a Poisson sampler. (If it was `fit`: something "
            "wrapped it before the first private optimizer was made; make one before that.) "
            f"{made}"
        )
    _check_origin(seen, sampling)


def _check_origin(seen, sampling):
    name = seen["sampling"] if seen["steps"] else provenance.UNKNOWN
    if name in (provenance.UNKNOWN, provenance.sampling_name(sampling)):
        return
    if sampling.amplified and not provenance.is_drawn(name):
        raise SamplingError(
            f"Cannot claim privacy amplification by {sampling!r}: an earlier `fit` hid what drew "
            "its batches, behind a generator or a `flat_map` for instance, and some may have been "
            "left out. Pass `sampling.dataset(...)` itself to every `fit`."
        )
    if not provenance.is_drawn(name):
        raise SamplingError(
            f"Cannot account the run by {sampling!r}: earlier steps were of epochs of another "
            "length, or of a `fit` without EpsilonCallback whose epochs need not be one pass over "
            "the data (`repeat`, `steps_per_epoch`, a generator). An example may have entered more "
            f"than once in {sampling.steps_per_epoch} steps. Pass the callback to every `fit`."
        )
    raise SamplingError(
        f"Cannot account the run by {sampling!r}: some of its {seen['steps']} steps were drawn by "
        "a sampling with other parameters (its class, `num_examples`, `expected_batch_size` or "
        "`num_groups`), or by several in one data set, at which a step costs more or less. Compile "
        "the model with a new optimizer for the other sampling, and compose both trainings by "
        "`accounting.compose_epsilon`."
    )


def _check_amplification(seen, iterations, sampling):
    claim = f"privacy amplification by {sampling!r}"
    remedy = (
        "Pass `sampling.dataset(...)` to `fit`, without operations that regroup, reorder or drop "
        "its batches, and the optimizer `rows_per_unit` if it has views. Data passed as arrays or "
        "as any other data set is accounted as `ShuffledEpochs`."
    )
    if seen["disordered_steps"]:
        raise SamplingError(
            f"Cannot claim {claim}: {seen['disordered_steps']} of {iterations} steps used batches "
            f"that it did not draw, or that came out of order. {remedy}"
        )
    if seen["largest_group"] >= sampling.num_groups:
        raise SamplingError(
            f"Cannot claim {claim}: batches came from a sampler with at least "
            f"{seen['largest_group'] + 1} groups, not {sampling.num_groups}. Use one sampling "
            "object for the data set and for the accounting."
        )
    if seen["shortest_cycle"] < sampling.num_groups:
        raise SamplingError(
            f"Cannot claim {claim}: group 0 came back after {seen['shortest_cycle']} steps, not "
            f"{sampling.num_groups}, so one example may enter twice in a row. This happens when a "
            "pass over the data is cut short and a loop of your own goes on. Train whole epochs, "
            "or call `fit`, which closes the open cycle first."
        )
