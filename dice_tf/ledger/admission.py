# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Which data `fit` may train on, decided before its first step.

What a sampler draws is worth its amplification only if every batch of it is trained on, once,
as it was drawn. So between a sampler and `fit` there may only be operations that hand on each
batch: a list of what is allowed, because nobody can list what is not. Other data is accounted
as `ShuffledEpochs`, each example once per epoch, and must not hold operations that repeat
examples.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from dice_tf.errors import SamplingError

# They hand on every batch. What a `map` makes of one is checked by its sample weights.
_PER_BATCH = frozenset(
    {
        "Map", "ParallelMap", "Prefetch", "Repeat", "Options", "AssertCardinality", "Zip",
        "Concatenate", "CopyToDevice", "Restructured",
    }
)  # fmt: skip
# They show examples several times, by chance or on purpose.
_REPEATING = frozenset({"Repeat", "ShuffleAndRepeat", "Sampling"})
# They hold the rows of several data sets, which may be rows of one.
_JOINING = frozenset({"Concatenate", "DirectedInterleave"})
# They hand on all rows, if perhaps in another order.
_ALL_ROWS = frozenset(
    {
        "Map", "ParallelMap", "Prefetch", "Options", "AssertCardinality", "Shuffle", "Cache",
        "Batch", "ParallelBatch", "PaddedBatch", "Unbatch", "Concatenate", "DirectedInterleave",
        "Zip",
    }
)  # fmt: skip


class Source(NamedTuple):
    """The batches of one call of `sampling.dataset`.

    Attributes:
        sampling: The object that draws them.
        draws: List that holds the number of batches drawn so far.
        row_order: Function that reads rows and returns an int, another one for another order of
            them; `None` where order means nothing.
        rows_per_unit: Int, how many consecutive rows are of one example or owner.
    """

    sampling: Any
    draws: list
    row_order: Callable[[], int] | None = None
    rows_per_unit: int = 1


def mark(dataset, source):
    """Marks a data set as the batches of `source`, as they were drawn."""
    dataset.dice_tf_source = source


def sources(data):
    """Returns the `Source`s behind a data set, and refuses what may alter their batches.

    Args:
        data: What `fit` received as `x`.

    Returns:
        List of `Source`s; empty if no sampler is seen to have drawn the data.

    Raises:
        SamplingError: If an operation that is not known to hand on every batch stands
            between a sampler and `fit`.
    """
    # A distributed data set, and one of several samplers, are made from those they hold.
    data = getattr(data, "_original_dataset", data)
    if hasattr(data, "dice_tf_source"):
        return [data.dice_tf_source]
    inputs = data._inputs() if isinstance(data, tf.data.Dataset) else []
    found = [sources(parent) for parent in inputs]
    drawn = sum(found, [])
    if drawn:
        _check_operation(data, found, drawn)
    return drawn


def draw_counts(found):
    """Returns the lists that hold the numbers of batches drawn, of a list of `Source`s."""
    # A data set that comes twice in a pipeline has one count.
    return list({id(source.draws): source.draws for source in found}.values())


def samplings_anywhere(data):
    """Returns the sampling objects behind a data set, whatever was done to their batches."""
    marked = (node for node in _behind(data) if hasattr(node, "dice_tf_source"))
    return [node.dice_tf_source.sampling for node in marked]


def row_order(found):
    """Returns the order of rows behind a list of `Source`s by now, `None` if it means nothing."""
    return found[0].row_order() if found and found[0].row_order else None


def check_claim(sampling, data, found):
    """Refuses to account a `fit` by a sampling that does not draw its data.

    Args:
        sampling: The sampling of an `EpsilonCallback`.
        data: What `fit` received as `x`.
        found: `sources(data)`.

    Raises:
        SamplingError: If amplification is claimed for batches that `sampling` is not seen to
            draw, all of them; or if data that is to show each example once per epoch is drawn
            by a Poisson sampler, or repeats or resamples its examples.
    """
    others = [source.sampling for source in found if source.sampling is not sampling]
    if sampling.amplified:
        if others:
            raise SamplingError(
                f"Cannot claim privacy amplification by {sampling!r} for batches that "
                f"{others[0]!r} draws. Pass the callback the very object whose `dataset` feeds "
                "`fit`, and draw a data set from one object."
            )
        if not found:
            raise SamplingError(
                f"Cannot claim privacy amplification by {sampling!r}: it is not seen to draw the "
                f"data of this `fit`. Received: x of type {type(data).__name__}. Pass "
                "`sampling.dataset(...)` itself, not a generator or `flat_map` around it; data "
                "passed as arrays or as any other data set is accounted as `ShuffledEpochs`."
            )
    elif any(other.amplified for other in others):
        raise SamplingError(
            f"Cannot account the run by {sampling!r}: it uses batches of a Poisson sampler, which "
            "may draw an example several times in one epoch. Pass the callback the object whose "
            "`dataset` feeds `fit`."
        )
    elif not found:
        _check_repeats_nothing(sampling, data)


def _check_operation(data, found, drawn):
    operation, sampling = _operation(data), drawn[0].sampling
    if operation == "Cache" and sampling.amplified:
        raise SamplingError(
            f"The batches of {sampling!r} are cached, so that each epoch trains on the draws of "
            "the first, which amplification by sampling does not cover. Leave `cache()` out, or "
            "cache the data before they are drawn from."
        )
    if operation == "Cache":
        return  # Every epoch has each example once, if in one and the same order.
    if operation in ("ParallelMap", "Options") and _may_reorder(data) and sampling.amplified:
        raise SamplingError(
            f"`deterministic=False` lets batches of {sampling!r} overtake each other, those that "
            "are quick to map first, which depends on what they hold; epsilon is of batches in the "
            "order drawn. Leave `deterministic=False` out: `num_parallel_calls` and `prefetch` "
            "stay."
        )
    if operation not in _PER_BATCH:
        raise SamplingError(
            f"`{_spelled(operation)}` stands between {sampling!r} and `fit`. It may leave out, "
            "repeat or reorder batches, perhaps because of what they hold, and epsilon is of all "
            "batches as drawn. Allowed are map, prefetch, repeat, zip and with_options. For fewer "
            "steps use `repeat()` and pass `steps_per_epoch`; leave examples out before "
            "`sampling.dataset`."
        )
    if operation == "Zip" and sum(map(bool, found)) > 1:
        raise SamplingError(
            f"Several batches that {sampling!r} draws are zipped into one step, which an example "
            "could enter twice. Draw each batch by one `sampling.dataset`, with a larger "
            "`expected_batch_size`, and pass several inputs as a dictionary of arrays."
        )
    if operation == "Concatenate" and not all(found):
        raise SamplingError(
            f"A part of this data set is drawn by {sampling!r}, another part is not: no sampling "
            "accounts for both. Train on them in two runs, and compose both by "
            "`accounting.compose_epsilon`."
        )
    if operation == "Concatenate" and len({row_order([source]) for source in drawn}) > 1:
        raise SamplingError(
            f"The data sets joined here hold other rows, or rows in another order, and "
            f"{sampling!r} assigns rows to groups by their place: an example could be in two "
            "groups. Join the rows before `sampling.dataset`."
        )


def _may_reorder(data):
    # One says so for itself, the other for all before it that do not say.
    return getattr(data, "_deterministic", None) == "false" or (
        _operation(data) == "Options" and data.options().deterministic is False
    )


def repeating_operation(data):
    """Returns what shows examples of a data set more than once in an epoch, as users write it.

    Args:
        data: What `fit` received as `x`.

    Returns:
        Str such as `"repeat"`, or `None` if nothing is seen to.
    """
    for node in _behind(data):
        repeats = _operation(node) in _REPEATING or _REPEATING & _operations_within(node)
        if repeats or _joins_the_same_rows(node):
            return _spelled(_operation(node))
    return None


def _check_repeats_nothing(sampling, data):
    operation = repeating_operation(data)
    if operation is not None:
        raise SamplingError(
            f"Cannot account the run by {sampling!r}: `{operation}` shows examples more than once "
            "in an epoch, or draws them with replacement. Let each epoch be one pass over the "
            "data, without `repeat` and resampling; for rare classes pass `class_weight`."
        )


def _joins_the_same_rows(data):
    """Whether a data set joins some that have rows in common, as for more of a rare class."""
    if _operation(data) not in _JOINING:
        return False
    before = {}
    for part in _inputs(data):
        of_part = {}
        _note_rows(part, True, of_part)
        # Two that each leave rows out may have none in common, such as `take` and `skip`.
        if any(before[key] or whole for key, whole in of_part.items() if key in before):
            return True
        before |= of_part
    return False


def _note_rows(data, whole, found):
    """Notes whether all rows of a data set, and of those behind it, are in what is joined."""
    found[id(data)] = whole or found.get(id(data), False)
    for node in _inputs(data):
        _note_rows(node, whole and _operation(data) in _ALL_ROWS, found)


def _inputs(data):
    # What chooses among several data sets is none of them.
    return getattr(data, "_data_inputs", data._inputs())


def _behind(data):
    """Returns every data set behind `data`, itself included."""
    data = getattr(data, "_original_dataset", data)
    if not isinstance(data, tf.data.Dataset):
        return []
    inputs = _inputs(data)
    if _operation(data) == "Zip":
        # One element for every row, as `timeseries_dataset_from_array` has it.
        inputs = [node for node in inputs if not _is_constant(node)]
    return [data, *(node for parent in inputs for node in _behind(parent))]


def _is_constant(node):
    inputs = node._inputs()
    return _operation(node) == "Repeat" and _operation(inputs[0]) == "Tensor"


def _operation(dataset):
    """Returns what a data set does to those it is made of, by the name of its class."""
    return type(dataset).__name__.strip("_").removesuffix("Dataset")


def _operations_within(dataset):
    """Returns the operations in the function of a data set, which makes others in `flat_map`."""
    function = getattr(getattr(dataset, "_map_func", None), "function", None)
    if function is None:
        return set()
    definition = function.graph.as_graph_def()
    bodies = [definition.node, *(inner.node_def for inner in definition.library.function)]
    names = {operation.op for body in bodies for operation in body}
    return {name.removesuffix("V2").removesuffix("Dataset") for name in names}


def _spelled(operation):
    if operation == "DirectedInterleave":
        return "sample_from_datasets"
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in operation).lstrip("_")
