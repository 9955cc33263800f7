# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Picks examples of a batch that differ, because copies of one example hide mixing."""

import numpy as np
import tensorflow as tf

_CANDIDATES = 32


def groups_of_different_examples(x, y, sample_weight, size):
    """Returns groups of examples of nonzero weight whose inputs all differ.

    Args:
        x: Inputs of a batch.
        y: Its targets, which differ as well where possible.
        sample_weight: `None`, or the weights of the batch.
        size: Int, the most examples in a group.

    Returns:
        List of lists of indices, all of one length.
    """
    live = np.flatnonzero(_is_live(x, sample_weight))[:_CANDIDATES]
    rows = lambda part: map_leaves(lambda t: tf.gather(t, live), part)
    x_keys, y_keys = (keys(rows(part), len(live)) for part in (x, y))
    groups, left = [], list(range(len(live)))
    while left:
        group = []
        while len(group) < size:
            taken = {x_keys[i] for i in group}
            fresh = [i for i in left if x_keys[i] not in taken]
            if not fresh:
                break
            # Other targets as well where possible: a loss may mix those.
            seen = {y_keys[i] for i in group}
            group.append(next((i for i in fresh if y_keys[i] not in seen), fresh[0]))
            left.remove(group[-1])
        if groups and len(group) < len(groups[0]):
            break
        groups.append(group)
    return [live[group].tolist() for group in groups]


def keys(structure, count):
    """Returns one value per example, equal for equal examples.

    Args:
        structure: Nest of tensors, or `None`, with `count` rows each.
        count: Int, the number of examples.
    """
    leaves = [np.asarray(t) for t in tf.nest.flatten(structure) if t is not None]
    # Texts are objects, whose bytes are addresses.
    key = lambda row: repr(row.tolist()) if row.dtype == object else row.tobytes()
    return [tuple(key(np.asarray(leaf[i])) for leaf in leaves) for i in range(count)]


def map_leaves(function, structure):
    """Applies a function to what is not `None` in a nest of tensors."""
    return tf.nest.map_structure(lambda t: t if t is None else function(t), structure)


def _is_live(x, sample_weight):
    weights, count = tf.nest.flatten(sample_weight), tf.nest.flatten(x)[0].shape[0]
    if not count or any(weight is None for weight in weights):
        return np.ones(count, bool)
    return np.any([np.any(np.reshape(w, [count, -1]) != 0, axis=1) for w in weights], axis=0)
