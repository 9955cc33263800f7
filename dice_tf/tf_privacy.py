# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""DiceSGD for code that is written for TensorFlow Privacy: `DiceSumQuery`.

Not imported by `import dice_tf`, because it imports `tensorflow_privacy`, which exists for
Python below 3.12 only. Keras models need none of it: see `dice_tf.DiceSGDOptimizer`, and
docs/migrating.md.
"""

import collections
import importlib
import importlib.util
import sys

import dp_accounting
import tensorflow as tf

from dice_tf.errors import MechanismError, MissingPackageError, ReleaseError
from dice_tf.mechanism import DiceMechanism, rounding
from dice_tf.mechanism.clipping import clip_weights
from dice_tf.mechanism.noise import NoiseKey, gaussian_noise


def import_tensorflow_privacy():
    """Imports `tensorflow_privacy`, as much of it as the installed TensorFlow permits.

    With TensorFlow 2.16 and later its plain import fails, in an estimator that TensorFlow
    no longer has. Then it is imported with its own switch for leaving its submodules out,
    which are imported by their full names: `tensorflow_privacy.privacy.dp_query`,
    `.optimizers`, `.keras_models`, `.analysis`.

    Returns:
        The module `tensorflow_privacy`.

    Raises:
        MissingPackageError: If it is not installed, or fails to import in both ways.

    Example:

    >>> import_tensorflow_privacy().__name__
    'tensorflow_privacy'
    """
    name = "tensorflow_privacy"
    if name not in sys.modules and importlib.util.find_spec(name) is None:
        raise MissingPackageError(
            "dice_tf.tf_privacy needs the package tensorflow-privacy, which is not installed. "
            f"Received: Python {sys.version_info.major}.{sys.version_info.minor}. With Python 3.10 "
            "or 3.11, `pip install tensorflow-privacy==0.9.0`; it does not exist for later ones. "
            "`dice_tf.DiceSGDOptimizer` does without it on every Python."
        )
    try:
        return importlib.import_module(name)
    except Exception:  # What fails in there depends on the releases of three packages.
        pass
    sys.skip_tf_privacy_import = True
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise MissingPackageError(
            "The installed tensorflow-privacy cannot be imported. Received: "
            f"{type(error).__name__}: {error}. dice_tf is tested with tensorflow-privacy==0.9.0."
        ) from error
    finally:
        del sys.skip_tf_privacy_import


# Before the line below, which needs it.
import_tensorflow_privacy()
from tensorflow_privacy.privacy.dp_query import dp_query

_SampleState = collections.namedtuple("_SampleState", ["heads", "residuals"])


class _GlobalState(collections.namedtuple("_GlobalState", ["errors"])):
    """What goes from round to round: the error e, or `()` without error feedback."""

    __slots__ = ()

    def _asdict(self):
        # TF-Privacy's Keras optimizers call this to write the state to a saved model.
        if not tf.nest.flatten(self.errors):
            return super()._asdict()
        raise ReleaseError(
            "The global state of DiceSumQuery holds the error e, a sum over examples without "
            "noise, so it is not written to configurations or saved models. Save the model "
            "without its optimizer: `model.save(path, include_optimizer=False)`."
        )


class DiceSumQuery(dp_query.SumAggregationDPQuery):
    r"""`DPQuery` that releases a noised sum of clipped records, with error feedback.

    With records \(g_i\), \(h_i = \mathrm{clip}(g_i, C_1)\) and
    \(r_i = \mathrm{clip}(g_i - h_i, C_2)\), a round releases, on the scale of the sum,

    \[\sum_i h_i + e + w, \qquad w \sim N(0, (z C_1)^2 I), \qquad e' = \sum_i r_i.\]

    It takes the place of `GaussianSumQuery(l2_norm_clip, noise_multiplier * l2_norm_clip)`, to
    which it is equal with `error_norm_clip=0`, and can be the numerator of a
    `NormalizedQuery` or part of a `NestedQuery`.

    **The event.** Every round emits `GaussianDpEvent(z C1 / (C1 + C2))`. If each round's
    records are a Poisson sample, compose `PoissonSampledDpEvent(p, event)` over the rounds; if
    nothing is known about who takes part when, compose the events as they are. Proof: split
    the noise of a round into independent parts of variances in the proportion
    \(C_1 : C_2\), and let an observer see as one release the heads of a round with the first
    part of its noise, and its residuals with the second part of the noise of the next round.
    What is really released is a function of these releases. With
    \(\sigma = z C_1\), a record moves one by at most

    \[\Bigl(\frac{C_1^2}{\sigma^2 C_1 / (C_1 + C_2)}
      + \frac{C_2^2}{\sigma^2 C_2 / (C_1 + C_2)}\Bigr)^{1/2} = \frac{C_1 + C_2}{\sigma}\]

    standard deviations. A ledger that adds up rounds one by one can claim no less, because it
    does not know when a record comes back: if that may be in the next round, its new head
    and its last residual meet in one release. That records return only every other round
    is a property of the whole run. Then compose, once and in place of the events of the
    rounds, `accounting.dp_event(mechanism, CyclicPoissonSampling(...), steps)`, which is
    smaller.

    **State.** The global state is the error e, as private as the data: neither show nor save
    it. In a `tf.function` it must be an argument and a result. Use each state for one
    release: a second one releases the same residuals again, which the events do not cover.
    After a crash go on from `initial_global_state()`, which loses the residuals of one round
    and no privacy. The noise key and the number of draws stay in this object, not in the
    state, so that even then noise never repeats and cannot cancel in a difference. So noise
    is drawn where `get_noised_result` runs, in one process; a copy, a pickle that is read
    and a forked process have keys of their own, unless a `noise_seed` decides.

    All arithmetic is float32. A record with an entry that is not finite contributes nothing.

    Args:
        l2_norm_clip: Float >= 1e-12, \(C_1\): threshold of the norm of a whole record.
        noise_multiplier: Float >= 0, \(z\): noise standard deviation on the sum, divided
            by `l2_norm_clip`.
        record_specs: Nested structure of `tf.TensorSpec`s, tensors or variables, with the
            shapes and dtypes of a record, for example `model.trainable_variables`.
        error_norm_clip: Float >= 0, \(C_2\): threshold of a residual. Defaults to
            `l2_norm_clip`; 0 means no error feedback.
        noise_seed: Int or `None`: fixes the noise for tests. Whoever knows it can remove the
            noise.

    Raises:
        MechanismError: If a parameter is out of range, or a shape is not fully known.

    Example:

    >>> query = DiceSumQuery(
    ...     l2_norm_clip=1.0, noise_multiplier=0.0, record_specs=tf.TensorSpec([2]))
    >>> state = query.initial_global_state()
    >>> for records in ([[3.0, 0.0]], [[0.0, 0.5]]):
    ...     params = query.derive_sample_params(state)
    ...     sample = query.initial_sample_state()
    ...     for record in records:
    ...         sample = query.accumulate_record(params, sample, tf.constant(record))
    ...     result, state, event = query.get_noised_result(sample, state)
    ...     print([round(float(value), 3) for value in result], event)
    [1.0, 0.0] GaussianDpEvent(noise_multiplier=0.0)
    [1.0, 0.5] GaussianDpEvent(noise_multiplier=0.0)

    Source: Zhang et al., ICLR 2024, Alg. 1 lines 5 to 7, with the residual of each record
    bounded.
    """

    def __init__(
        self, l2_norm_clip, noise_multiplier, record_specs, error_norm_clip=None, noise_seed=None
    ):
        # On the scale of the sum: whoever wants the mean divides by a public constant later.
        self._mechanism = DiceMechanism(
            l2_norm_clip=l2_norm_clip,
            noise_multiplier=noise_multiplier,
            error_norm_clip=error_norm_clip,
            expected_batch_size=1,
            noise_is_secret=noise_seed is None,
        )
        self._record_specs = tf.nest.map_structure(_check_spec, record_specs)
        self._noise_key = NoiseKey(noise_seed)
        with tf.init_scope():
            self._draws = tf.Variable(0, dtype=tf.int64, trainable=False, name="noise_draws")

    def _zeros(self):
        return tf.nest.map_structure(lambda spec: tf.zeros(spec.shape), self._record_specs)

    def initial_global_state(self):
        """Returns the state before the first round: the error is zero."""
        return _GlobalState(self._zeros() if self._mechanism.error_norm_clip > 0 else ())

    def initial_sample_state(self, template=None):
        """Returns zero sums of heads and residuals; `template` is what `record_specs` is."""
        del template
        return _SampleState(self._zeros(), self.initial_global_state().errors)

    def preprocess_record(self, params, record):
        """Returns the head and the residual of a record, both clipped.

        Args:
            params: `()`. The thresholds are constants, because the events rely on them.
            record: Nested structure like `record_specs`. Entries may be `None` (no
                gradient) or `tf.IndexedSlices`.

        Raises:
            MechanismError: If a part of the record has another shape.
        """
        del params
        parts = tf.nest.map_structure(_to_float, self._record_specs, record)
        norm = rounding.global_norm(tf.nest.flatten(parts))
        head, residual = clip_weights(norm[tf.newaxis], self._mechanism)
        # "no_nan": weight 0 times an infinite entry is 0.
        scale = lambda weight: tf.nest.map_structure(
            lambda part: tf.math.multiply_no_nan(part, weight[0]), parts
        )
        return _SampleState(scale(head), () if residual is None else scale(residual))

    def get_noised_result(self, sample_state, global_state):
        """Returns the release of a round, the next global state, and the event.

        Args:
            sample_state: The sums over the sample.
            global_state: The state after the round before.

        Returns:
            `(result, new_global_state, event)`; `result` has the structure and dtypes of
            `record_specs`.

        Raises:
            MechanismError: If `global_state` was frozen into a `tf.function`.

        Example:

        >>> query = DiceSumQuery(
        ...     l2_norm_clip=3.0, noise_multiplier=0.0, record_specs=tf.TensorSpec([2]))
        >>> state = query.initial_global_state()
        >>> sample = query.accumulate_record(
        ...     query.derive_sample_params(state), query.initial_sample_state(),
        ...     tf.constant([5.0, 0.0]))
        >>> result, state, event = query.get_noised_result(sample, state)
        >>> [round(float(value[0]), 3) for value in (result, state.errors)]
        [3.0, 2.0]
        """
        sums = tf.nest.flatten(sample_state.heads)
        if self._mechanism.error_norm_clip > 0:
            errors = tf.nest.flatten(global_state.errors)
            _check_state_is_live(errors)
            sums = [head + error for head, error in zip(sums, errors, strict=True)]
        if self._mechanism.noise_multiplier > 0:
            key, draw = self._noise_key.read(), self._draws.assign_add(1)
            # In one call: small tensors are parts of one draw, so two calls would repeat it.
            shapes = {i: total.shape for i, total in enumerate(sums)}
            noise = gaussian_noise(key, draw, shapes, self._mechanism.noise_stddev_of_sum)
            sums = [total + noise[i] for i, total in enumerate(sums)]
        result = tf.nest.map_structure(
            lambda spec, total: tf.cast(total, spec.dtype),
            self._record_specs,
            tf.nest.pack_sequence_as(self._record_specs, sums),
        )
        sensitivity = self._mechanism.sensitivity(separate_entries=False)
        event = dp_accounting.GaussianDpEvent(self._mechanism.noise_stddev_of_sum / sensitivity)
        return result, _GlobalState(sample_state.residuals), event


def _check_spec(spec):
    spec = tf.TensorSpec(getattr(spec, "shape", None), getattr(spec, "dtype", tf.float32))
    if not spec.shape.is_fully_defined() or not spec.dtype.is_floating:
        raise MechanismError(
            "Argument `record_specs` must hold floating-point tensors of known shapes, or their "
            f"`tf.TensorSpec`s. Received: {spec}."
        )
    return spec


def _to_float(spec, part):
    if part is None:
        return tf.zeros(spec.shape)
    # Adds up repeated rows of IndexedSlices: their norm is that of the sum.
    part = tf.convert_to_tensor(part)
    if not part.shape.is_compatible_with(spec.shape):
        # Broadcast to the sum, it would have a larger norm there than it was clipped to.
        raise MechanismError(
            f"A record must have the shapes of `record_specs`, here {spec.shape}. Received a part "
            f"of shape {part.shape}."
        )
    return tf.cast(tf.ensure_shape(part, spec.shape), tf.float32)


def _check_state_is_live(errors):
    live = all(tf.is_symbolic_tensor(e) or isinstance(e, tf.Variable) for e in errors)
    if not live and not tf.executing_eagerly():
        raise MechanismError(
            "The global state of DiceSumQuery was made outside this tf.function and is a constant "
            "inside, so the error would never be fed back. Pass the state to the function and "
            "return it; with TF-Privacy's Keras optimizers, compile with `run_eagerly=True`."
        )
