# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""Proof that a training step used a batch drawn by `dice_tf.sampling`.

Privacy amplification is only true of batches that were really drawn at random,
and Keras hands an optimizer no hint of where a batch came from. So Poisson and
cyclic batches carry a mark in the one tensor that reaches every train step: the
sample weights. Padding rows have weight zero; in a batch of group \(g\) exactly
\(g + 1\) of these zeros are negative zeros, \(-0.0\), and all others \(+0.0\). Where a
unit has several rows, exactly \(g + 1\) units of padding have negative zeros in all rows.

A negative zero equals zero in every comparison and product, so it changes no
result, and it survives `map`, `prefetch`, casts between float types and products
with positive weights. What regroups rows (`unbatch`, `batch`, `rebatch`, filtering
the padding away), reorders or drops batches destroys the pattern, and so does
any data that was never marked. The train step folds the count into a record of
a few integers; it is the same for every data set, so it is public. From the
record `check_record` tells whether an amplification claim is backed.
"""

import dataclasses
import hashlib

import numpy as np
import tensorflow as tf

from dice_tf.errors import AccountingError, SamplingError
from dice_tf.ledger import units

# What the record holds, in order. `steps`: steps recorded. `last_group`: group of the
# last batch, -1 before any and after an unmarked one. `shortest_cycle`: smallest number
# of groups between two returns to group 0. `largest_group`: largest group seen.
# `disordered_steps`: steps that were unmarked, or whose group was neither 0 nor the one
# after the last. `unfinished_steps`: steps of a pass over the data that was cut short,
# which the accountant counts although they were never made. `assignment`: name of the
# group assignment in use, -1 before the first. `sampling`: `sampling_name` of all steps
# of a known origin, `_UNKNOWN` before the first, `SEVERAL` if several samplers drew them,
# `UNSEEN` if epochs had several lengths or were not seen to be one pass over the data.
# `seeded_steps`: steps whose noise came from a `noise_seed`. `mechanism`: `mechanism_name` of
# all steps, `_UNKNOWN` before the first, `SEVERAL` if there were several. `loose_steps`: steps
# outside `fit` on batches without a mark: nobody knows where they came from. `loop_steps`: all
# steps outside `fit`, which nobody saw to make whole epochs.
# `first_seeded_draw`: number of the first step that a sampler with a seed drew, 0 if none did.
RECORD_FIELDS = (
    "steps",
    "last_group",
    "shortest_cycle",
    "largest_group",
    "disordered_steps",
    "unfinished_steps",
    "assignment",
    "sampling",
    "seeded_steps",
    "mechanism",
    "loose_steps",
    "loop_steps",
    "first_seeded_draw",
)
RECORD_SIZE = len(RECORD_FIELDS)
_NO_CYCLE = np.iinfo(np.int32).max
_UNKNOWN, SEVERAL, UNSEEN = -1, -2, -3
_NEGATIVE_ZERO_BITS = np.iinfo(np.int32).min


def initial_record():
    """Returns the record of a run that has not made a step.

    Returns:
        NumPy int32 `[RECORD_SIZE]`, to be stored in a non-trainable variable.
    """
    start = dict.fromkeys(RECORD_FIELDS, 0)
    start.update(last_group=-1, shortest_cycle=_NO_CYCLE, largest_group=-1, assignment=-1)
    start.update(sampling=_UNKNOWN, mechanism=_UNKNOWN)
    return pack_record(start)


def unpack_record(record):
    """Returns a record as a dictionary from field name to int.

    Args:
        record: Int32 `[RECORD_SIZE]`: NumPy array, tensor or variable.

    Returns:
        Dictionary with the keys `RECORD_FIELDS`.
    """
    return dict(zip(RECORD_FIELDS, np.asarray(record).tolist()))


def pack_record(fields):
    """Returns the record with the given fields, the inverse of `unpack_record`.

    Args:
        fields: Dictionary with the keys `RECORD_FIELDS`.

    Returns:
        NumPy int32 `[RECORD_SIZE]`.
    """
    return np.asarray([fields[name] for name in RECORD_FIELDS], dtype=np.int32)


def check_layout(record):
    """Refuses a record of a file that another version of dice_tf wrote.

    Args:
        record: Array, as it was stored.

    Raises:
        SamplingError: If it has not the fields of this version.
    """
    if np.shape(record) != (RECORD_SIZE,):
        raise SamplingError(
            "The optimizer in this file was saved by another version of dice_tf, whose record of "
            "the sampling has other fields, so its epsilon cannot be continued. Received: a record "
            f"of shape {np.shape(record)}, not ({RECORD_SIZE},). Load the model with "
            "`keras.models.load_model(path, compile=False)`, and compose its training with the "
            "next by `accounting.compose_epsilon`."
        )


def sampling_name(sampling):
    """Returns a public name of everything about a sampling that epsilon depends on.

    Args:
        sampling: Object of `dice_tf.sampling`; its seed and entropy do not count. Of
            `ShuffledEpochs` only the number of steps in an epoch counts.

    Returns:
        Int of 31 bits and a sign: negative, and below `UNSEEN`, for `ShuffledEpochs`.
    """
    if not sampling.amplified:
        return UNSEEN - 1 - _digest(sampling.steps_per_epoch)
    facts = (type(sampling).__name__, sampling.num_examples, sampling.expected_batch_size,
             sampling.num_groups)  # fmt: skip
    return _digest(facts if sampling.owners is None else (*facts, sampling.owners.rows_per_owner))


def mechanism_name(mechanism):
    """Returns a public name of everything about a mechanism that epsilon depends on.

    Args:
        mechanism: `DiceMechanism`; whether its noise is secret is recorded apart.

    Returns:
        Int >= 0 of 30 bits.
    """
    return _digest(dataclasses.replace(mechanism, noise_is_secret=True))


def _digest(facts):
    return int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:4], "little") >> 2


def _is_drawn(name):
    """Whether a name is of steps whose marks tell that a sampler drew them."""
    return name >= 0 or name == SEVERAL


def join_sampling(fields, sampling):
    """Returns the fields of a record whose next steps are drawn by `sampling`.

    Args:
        fields: Dictionary with the keys `RECORD_FIELDS`.
        sampling: Object of `dice_tf.sampling`, or `SEVERAL` or `UNSEEN`.

    Returns:
        Dictionary with the same keys.
    """
    name = sampling if isinstance(sampling, int) else sampling_name(sampling)
    known = fields["sampling"]
    if fields["steps"] and known not in (_UNKNOWN, name):
        # Marks do not tell what was left out of data whose sampler was not seen.
        name = SEVERAL if _is_drawn(known) and _is_drawn(name) else UNSEEN
    first = fields["first_seeded_draw"] if draws_were_seeded(fields) else 0
    if not first and getattr(sampling, "seed", None) is not None:
        first = fields["steps"] + 1
    return dict(fields, sampling=name, first_seeded_draw=first)


def draws_were_seeded(fields):
    """Whether a sampler with a seed drew some of the steps of a record, as far as `fit` knows."""
    return 0 < fields["first_seeded_draw"] <= fields["steps"]


def count_marks(sample_weight, rows_per_unit=1):
    """Counts the units of a batch all of whose sample weights are negative zeros.

    Units of another size than that of the sampler are found out: the count of its first batch
    is then not 1, which is that of no first batch.

    Args:
        sample_weight: Float tensor `[batch]`, a nest of them (the first leaf counts), or
            `None`. In rows with another weight than 0 none is counted.
        rows_per_unit: Int, the number of rows that the step clips as one.

    Returns:
        Int32 scalar tensor. With several replicas, add up their counts.

    Example:

    >>> int(count_marks(tf.constant([2.0, 0.0, -0.0])))
    1
    """
    leaves = tf.nest.flatten(sample_weight)
    if not leaves or any(leaf is None for leaf in leaves):
        return tf.constant(0, tf.int32)
    of_rows = lambda leaf: list(range(1, leaf.shape.rank))
    bits = tf.bitcast(tf.cast(leaves[0], tf.float32), tf.int32)
    marked = tf.reduce_any(bits == _NEGATIVE_ZERO_BITS, of_rows(leaves[0]))
    for leaf in leaves:
        # Padding that one output or time step trains on is no padding.
        marked &= tf.reduce_all(leaf == 0, of_rows(leaf))
    rows = tf.reduce_sum(tf.cast(marked, tf.int32))
    if rows_per_unit == 1:
        return rows
    # Not of whole units, if its sampler had others.
    padded = tf.pad(marked, [[0, -tf.shape(marked)[0] % rows_per_unit]])
    whole = tf.reduce_all(tf.reshape(padded, [-1, rows_per_unit]), 1)
    units = tf.reduce_sum(tf.cast(whole, tf.int32))
    return tf.where(rows == units * rows_per_unit, units, 0)


def update_record(record, marks, noise_is_secret=True, mechanism=_UNKNOWN, in_fit=True):
    """Returns the record after one more step.

    Args:
        record: Int32 `[RECORD_SIZE]`, the record so far.
        marks: Int32 scalar, `count_marks` of the step's batch over all replicas.
        noise_is_secret: Whether the step's noise key is, see `DiceMechanism`.
        mechanism: Int, `mechanism_name` of the step.
        in_fit: Whether `fit` takes the step, bool or bool tensor.

    Returns:
        Int32 tensor `[RECORD_SIZE]`.

    Example:

    >>> record = initial_record()
    >>> for group in (0, 1, 0):
    ...     record = update_record(record, group + 1)
    >>> unpack_record(record)["shortest_cycle"]
    2
    """
    fields = dict(zip(RECORD_FIELDS, tf.unstack(tf.convert_to_tensor(record))))
    group = tf.cast(marks, tf.int32) - 1
    last = fields["last_group"]
    in_order = (group >= 0) & ((group == 0) | (group == last + 1))
    returned = (group == 0) & (last >= 0)
    cycle = tf.where(returned, last + 1, _NO_CYCLE)
    # Also an optimizer that took over the state of another one in a way that nobody saw.
    same = (fields["steps"] == 0) | (fields["mechanism"] == mechanism)
    loose = (group < 0) & ~tf.cast(in_fit, tf.bool)
    fields.update(
        steps=fields["steps"] + 1,
        last_group=group,
        shortest_cycle=tf.minimum(fields["shortest_cycle"], cycle),
        largest_group=tf.maximum(fields["largest_group"], group),
        disordered_steps=fields["disordered_steps"] + tf.cast(~in_order, tf.int32),
        seeded_steps=fields["seeded_steps"] + int(not noise_is_secret),
        mechanism=tf.where(same, mechanism, SEVERAL),
        loose_steps=fields["loose_steps"] + tf.cast(loose, tf.int32),
        loop_steps=fields["loop_steps"] + tf.cast(~tf.cast(in_fit, tf.bool), tf.int32),
    )
    return tf.stack([fields[name] for name in RECORD_FIELDS])


def check_mechanism(record, mechanism):
    """Refuses a claim about steps that were made with other privacy parameters.

    Args:
        record: Int32 `[RECORD_SIZE]`, the record kept by the train step.
        mechanism: The `DiceMechanism` that the run is accounted with.

    Raises:
        AccountingError: If some steps had another one.
        SamplingError: If its units have several rows, and steps were on batches of no sampler.
    """
    seen = unpack_record(record)
    if seen["steps"] and seen["mechanism"] != mechanism_name(mechanism):
        raise AccountingError(
            f"Some of the {seen['steps']} steps of this optimizer were made with other privacy "
            "parameters and loaded into it: one epsilon cannot count both. Received: "
            f"noise_multiplier={mechanism.noise_multiplier:g}, "
            f"l2_norm_clip={mechanism.l2_norm_clip:g}. Compile the model with a new optimizer, "
            "and compose both trainings: `accounting.compose_epsilon([(mechanism, sampling, "
            "steps), ...], delta)`."
        )
    units.check_steps(mechanism, seen["loose_steps"])


def check_record(record, iterations, sampling, largest_batch=0):
    """Refuses a claim about the sampling that the steps of a run do not back.

    Args:
        record: Int32 `[RECORD_SIZE]`, the record kept by the train step.
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
    seen = unpack_record(record)
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
    elif seen["loose_steps"]:
        size = sampling.expected_batch_size
        fits = largest_batch <= size
        made = (
            f"For steps already made, `ShuffledEpochs({size}, {size})` counts each as an epoch; "
            "keep delta below 1/N of the data."
            if fits
            else f"Steps of {largest_batch} rows have no epsilon: take at most {size}."
        )
        raise SamplingError(
            f"Cannot account the run by {sampling!r}: {seen['loose_steps']} of {iterations} steps "
            "were made outside `fit`, where nobody sees that an epoch shows each example once. "
            f"Give `fit` the data, or loop over a Poisson sampler. {made}"
        )
    _check_origin(seen, sampling)


def _check_origin(seen, sampling):
    name = seen["sampling"] if seen["steps"] else _UNKNOWN
    if name in (_UNKNOWN, sampling_name(sampling)):
        return
    if sampling.amplified and not _is_drawn(name):
        raise SamplingError(
            f"Cannot claim privacy amplification by {sampling!r}: an earlier `fit` hid what drew "
            "its batches, behind a generator or a `flat_map` for instance, and some may have been "
            "left out. Pass `sampling.dataset(...)` itself to every `fit`."
        )
    if not _is_drawn(name):
        raise SamplingError(
            f"Cannot account the run by {sampling!r}: earlier steps were of epochs of another "
            "length, or of a `fit` without EpsilonCallback whose epochs need not be one pass over "
            "the data (`steps_per_epoch`, a generator). An example may have entered more than once "
            f"in {sampling.steps_per_epoch} steps. Pass the callback to every `fit`; arrays and "
            "data sets that know their length can do without."
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
