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
record `claims` tells whether an amplification claim is backed.

Why marks: in a loop of one's own, behind `map` and in a `train_step` of the user nothing of a
data set reaches the step but its tensors, so only they can say which draw a batch is.

What the record holds, in order, and which guarantee needs it:

* `steps`: steps taken. Epsilon counts them; `optimizer.iterations` anybody may assign.
* `last_group`, -1 before any and after an unmarked batch; `shortest_cycle`, the smallest number of
  steps between two batches of group 0; `largest_group`: no example enters twice in a cycle.
* `disordered_steps`: steps that were unmarked, or whose group was neither 0 nor the one after the
  last. Amplification is claimed only if there are none.
* `unfinished_steps`: steps that passes lack that were cut short. Epsilon counts what an example
  may have entered, and it may have entered the part that was made.
* `assignment`: name of the group assignment in use, -1 before the first. Of other groups no error
  may be fed back.
* `sampling`: `sampling_name` of all steps of a known origin, `UNKNOWN` before the first,
  `SEVERAL` if several samplers drew them, `UNSEEN` if epochs had several lengths or were not seen
  to be one pass over the data. One epsilon counts steps of one sampling.
* `seeded_steps`: steps whose noise came from a `noise_seed`. The statement says so, for good.
* `mechanism`: `mechanism_name` of all steps, `UNKNOWN` before the first, `SEVERAL` if there were
  several. One epsilon counts steps of one mechanism.
* `loop_steps`: steps outside `fit`. Nobody saw that they make whole epochs.
* `first_seeded_draw`: number of the first step that a sampler with a seed drew, 0 if none did. The
  statement says so once that step is taken.

`PrivateState` of an optimizer has the counts that must not go back when a file is loaded, or that
no public file may hold:

* `noise_draws`, draws by the bound key, goes back with private files only: replays are identical.
* `process_draws`, draws by the other key, never goes back: it must not hide two directions alike.
  Less `draws_left_out`, skipped for a seed's sake, these are the steps taken here.
* `error_step`, the step whose residuals the errors are: no others are fed back.
* `fit_ended_at` and `loop_steps_before`: steps of loops need as many draws (`draw_origins`).
* `row_counts`: an epoch shows no more rows than there are examples. Weights decide them, so they
  are private.
"""

import dataclasses
import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

from dice_tf.errors import SamplingError

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
    "loop_steps",
    "first_seeded_draw",
)
RECORD_SIZE = len(RECORD_FIELDS)
_NO_CYCLE = np.iinfo(np.int32).max
UNKNOWN, SEVERAL, UNSEEN = -1, -2, -3
_NEGATIVE_ZERO_BITS = np.iinfo(np.int32).min


def initial_record():
    """Returns the record of a run that has not made a step.

    Returns:
        NumPy int32 `[RECORD_SIZE]`, to be stored in a non-trainable variable.
    """
    start: dict[str, int] = dict.fromkeys(RECORD_FIELDS, 0)
    start.update(last_group=-1, shortest_cycle=_NO_CYCLE, largest_group=-1, assignment=-1)
    start.update(sampling=UNKNOWN, mechanism=UNKNOWN)
    return pack_record(start)


def unpack_record(record) -> dict[str, int]:
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


def read_record(optimizer):
    """Returns the record of an optimizer as a dictionary.

    Args:
        optimizer: A private optimizer. One that its first batch will build has none yet.
    """
    stored = optimizer.sampling_record.numpy() if optimizer.built else None
    return unpack_record(initial_record() if stored is None else stored)


def write_record(optimizer, fields):
    """Makes these fields the record of an optimizer, or the one that it will begin with."""
    record = pack_record(fields)
    if optimizer.built:
        optimizer.sampling_record.assign(record)
    else:
        optimizer._private.first_record = record


def note_reused_draws(optimizer, steps):
    """Records steps that used a batch which an earlier step had used, for good."""
    record = read_record(optimizer)
    write_record(optimizer, dict(record, disordered_steps=record["disordered_steps"] + steps))


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
    # Files keep names, so moving a module must not change those of this package.
    package, kind = type(sampling).__module__.split(".")[0], type(sampling).__qualname__
    facts = ("num_examples", "expected_batch_size", "num_groups")
    others = (*facts, "seed", "owners")
    own = [f.name for f in dataclasses.fields(sampling) if f.name not in others]
    of_owners = () if sampling.owners is None else (sampling.owners.rows_per_owner,)
    return _digest((f"{package}.{kind}".removeprefix("dice_tf."),
                    *(getattr(sampling, name) for name in (*facts, *own)), *of_owners))  # fmt: skip


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


def is_drawn(name):
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
    if fields["steps"] and known not in (UNKNOWN, name):
        # Marks do not tell what was left out of data whose sampler was not seen.
        name = SEVERAL if is_drawn(known) and is_drawn(name) else UNSEEN
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
    count: Any = tf.shape(marked)[0]
    padded = tf.pad(marked, [[0, -count % rows_per_unit]])
    whole = tf.reduce_all(tf.reshape(padded, [-1, rows_per_unit]), 1)
    units = tf.reduce_sum(tf.cast(whole, tf.int32))
    return tf.where(rows == units * rows_per_unit, units, 0)


def update_record(record, marks, noise_is_secret=True, mechanism=UNKNOWN, in_fit=True):
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
    fields: dict[str, Any] = dict(zip(RECORD_FIELDS, tf.unstack(tf.convert_to_tensor(record))))
    group = tf.cast(marks, tf.int32) - 1
    last = fields["last_group"]
    in_order = (group >= 0) & ((group == 0) | (group == last + 1))
    returned = (group == 0) & (last >= 0)
    cycle = tf.where(returned, last + 1, _NO_CYCLE)
    # Also an optimizer that took over the state of another one in a way that nobody saw.
    same = (fields["steps"] == 0) | (fields["mechanism"] == mechanism)
    outside = tf.logical_not(tf.cast(in_fit, tf.bool))
    fields.update(
        steps=fields["steps"] + 1,
        last_group=group,
        shortest_cycle=tf.minimum(fields["shortest_cycle"], cycle),
        largest_group=tf.maximum(fields["largest_group"], group),
        disordered_steps=fields["disordered_steps"] + tf.cast(tf.logical_not(in_order), tf.int32),
        seeded_steps=fields["seeded_steps"] + int(not noise_is_secret),
        mechanism=tf.where(same, mechanism, SEVERAL),
        loop_steps=fields["loop_steps"] + tf.cast(outside, tf.int32),
    )
    return tf.stack([fields[name] for name in RECORD_FIELDS])
