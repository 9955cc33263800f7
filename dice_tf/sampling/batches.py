# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The data set of a sampler: its draws, the rows of the user's data, and the marks of both."""

import functools

import tensorflow as tf

from dice_tf.distribution import multi_worker
from dice_tf.ledger import admission, provenance
from dice_tf.sampling import row_order
from dice_tf.sampling.data_sources import row_fetcher, row_weights
from dice_tf.sampling.views import check_augment, check_views, with_views


def dataset(sampling, x, y, sample_weight, planned_epochs, views, augment):
    """Returns the `tf.data.Dataset` that `sampling.dataset` describes.

    Args:
        sampling: `Sampling`, whose draws and state it uses.
        x, y, sample_weight: As there, like all that follow.
        planned_epochs: Int >= 1.
        views: Int >= 1.
        augment: Function of features, or `None`.

    Raises:
        SamplingError: As there.
    """
    views = check_views(views, augment)
    fetch = row_fetcher(x, y, sampling.num_rows)
    if augment is not None:
        check_augment(augment, fetch, sampling.num_rows)
    fetch_views = with_views(fetch, views, augment)
    weights = row_weights(sample_weight, sampling.num_rows)
    replicas = multi_worker.join_workers(sampling)
    begin, draw, rows = sampling.draw_plan(sampling.steps(planned_epochs), replicas)
    draws, name = [0], provenance.sampling_name(sampling)

    def counted_draw(iteration, step):
        sampling._state.count_draw(draws, name)
        return draw(iteration, step)

    def batch(iteration, step):
        types = [tf.int64, tf.float32]
        indices, base = tf.numpy_function(counted_draw, [iteration, step], types)
        indices, base = tf.ensure_shape(indices, [rows]), tf.ensure_shape(base, [rows])

        def weigh(w):
            # Padding keeps the very bits of `base`: its zeros carry the provenance mark.
            of_rows = base if w is None else tf.where(base > 0, tf.gather(w, indices), base)
            return of_rows if views == 1 else tf.repeat(of_rows, views)

        return *fetch_views(indices), tf.nest.map_structure(weigh, weights)

    def batches_of(iteration):
        steps = tf.data.Dataset.range(sampling.steps_per_epoch)
        return steps.map(lambda step: batch(iteration, step))

    start = lambda _: tf.ensure_shape(tf.numpy_function(begin, [], tf.int64), [None])
    data = tf.data.Dataset.range(1).map(start).flat_map(batches_of)
    # Nothing here is left to TensorFlow to tune, and at the end of an epoch the thread that
    # does so is now and then waited for, up to a minute (seen with TensorFlow 2.21).
    options = tf.data.Options()
    options.autotune.enabled = False
    data = data.with_options(options)
    # Asked for when a `fit` begins: a list, or a file, may have changed by then.
    of_owners = b"" if sampling.owners is None else sampling.owners.digest
    order = functools.partial(row_order.fingerprint, fetch, sampling.num_rows, of_owners)
    order = order if sampling.num_groups > 1 or sampling.owners is not None else None
    source = admission.Source(sampling, draws, order, views * sampling.rows_per_unit)
    admission.mark(data, source)
    steps = tf.data.experimental.assert_cardinality(sampling.steps_per_epoch)
    return data.apply(steps).prefetch(2)
