# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Keras optimizers that take private steps.

A private optimizer is a Keras optimizer whose update rule only ever sees the noised
direction \\(v + w\\). What a Keras rule computes from it (momentum, schedules, weight
decay, averages) is post-processing and costs no privacy.
"""

import warnings

import keras
import tensorflow as tf

from dice_tf import dispatch, distribution, feedback, noise, provenance
from dice_tf.errors import GradientEngineError, OptimizerArgumentError, PlainGradientsError
from dice_tf.mechanism import DiceMechanism, check_integer

GRADIENT_ENGINES = ("auto", "layerwise", "vectorized")

_REFUSED_KERAS_ARGUMENTS = {
    "clipnorm": "it would clip the noised mean, variable by variable",
    "clipvalue": "it would clip the noised mean, coordinate by coordinate",
    "global_clipnorm": "it would clip the noised mean of the batch, not each example",
    "loss_scale_factor": "gradients are clipped before Keras could unscale them",
    "gradient_accumulation_steps": "it would add noise at every accumulated batch; use a larger "
    "`expected_batch_size` with `chunk_size` to bound memory",
}


class _PrivateState:
    """What must not leave the process: the noise key, its use so far, and the error.

    A plain Python object, so that neither Keras nor `tf.train.Checkpoint` finds it.
    """

    def __init__(self, noise_key):
        self.noise_key = noise_key
        self.noise_draws = None
        self.errors = []


class PrivateUpdate:
    """Mixin that turns a Keras optimizer class into a private one.

    The order of bases matters: `class MyOptimizer(PrivateUpdate, keras.optimizers.X)`.
    See `DiceSGDOptimizer` for the arguments.
    """

    def __init__(
        self,
        learning_rate=None,
        *,
        l2_norm_clip,
        noise_multiplier,
        expected_batch_size,
        error_norm_clip=None,
        bound_residuals=True,
        clipping="flat",
        feedback_steps=1,
        num_microbatches=None,
        chunk_size=None,
        gradient_engine="auto",
        self_check=True,
        noise_seed=None,
        **keras_arguments,
    ):
        for name, reason in _REFUSED_KERAS_ARGUMENTS.items():
            if keras_arguments.get(name) is not None:
                raise OptimizerArgumentError(
                    f"Argument `{name}` cannot be used for private training: {reason}. Received: "
                    f"{name}={keras_arguments[name]!r}. Clipping is set by `l2_norm_clip`."
                )
        mechanism = DiceMechanism(
            l2_norm_clip=l2_norm_clip,
            noise_multiplier=noise_multiplier,
            expected_batch_size=expected_batch_size,
            error_norm_clip=error_norm_clip,
            bound_residuals=bool(bound_residuals),
            clipping=clipping,
            feedback_steps=feedback_steps,
            num_microbatches=num_microbatches,
            noise_is_secret=noise_seed is None,
        )
        if mechanism.feedback_steps > 1:
            raise OptimizerArgumentError(
                "This version of the optimizer feeds residuals back at the next step only. "
                f"Received: feedback_steps={feedback_steps!r}. Use feedback_steps=1."
            )
        _check_engine(gradient_engine, mechanism, chunk_size)
        if mechanism.noise_multiplier == 0:
            warnings.warn(
                "noise_multiplier=0: training is not private, its epsilon is infinite.",
                stacklevel=2,
            )
        if learning_rate is not None:
            keras_arguments["learning_rate"] = learning_rate
        super().__init__(**keras_arguments)
        self._mechanism = mechanism
        self._private = _PrivateState(noise.NoiseKey(noise_seed))
        self.chunk_size = chunk_size
        self.gradient_engine = gradient_engine
        self.self_check = bool(self_check)
        dispatch.install()

    @property
    def mechanism(self):
        """The `DiceMechanism`: every parameter of this optimizer that enters epsilon."""
        return self._mechanism

    @property
    def errors(self):
        """The error e: a float32 variable per trainable variable, private.

        Empty if `error_norm_clip` is 0, because then nothing is fed back.
        """
        return list(self._private.errors)

    @property
    def sampling_record(self):
        """What `dice_tf.provenance` knows about how the batches so far were drawn."""
        return self._sampling_record

    def build(self, variables):
        """Creates the Keras slots, the error slots and the sampling record."""
        if self.built:
            return
        super().build(variables)
        if self._mechanism.error_norm_clip > 0:
            self._private.errors = [self._add_error(variable) for variable in variables]
        self._private.noise_draws = keras.Variable(
            0, dtype="int64", trainable=False, aggregation="only_first_replica", name="noise_draws"
        )
        self._sampling_record = self.add_variable(
            shape=(provenance.RECORD_SIZE,),
            initializer=keras.initializers.Constant(provenance.initial_record()),
            dtype="int32",
            name="sampling_record",
            aggregation="only_first_replica",
        )

    def _add_error(self, variable):
        # Not `add_variable`: Keras writes the variables it tracks into every kind of file.
        with self._distribution_strategy.extended.colocate_vars_with(variable.value):
            return keras.Variable(
                initializer="zeros",
                shape=variable.shape,
                dtype="float32",
                trainable=False,
                name=f"{variable.path.replace('/', '_')}_error",
            )

    def apply(self, grads, trainable_variables=None):
        """Refuses: gradients of a batch were not clipped per example.

        Raises:
            PlainGradientsError: Always. Private updates come from
                `dice_tf.private_train_step`, which `fit` and `train_on_batch` use.
        """
        raise PlainGradientsError(
            f"{type(self).__name__} received gradients that were summed over a batch, so the "
            "influence of one example on them is not bounded. In a custom training loop call "
            "`dice_tf.private_train_step(model, (x, y))` instead of `tape.gradient` and "
            "`apply_gradients`; a model whose `train_step` is overridden must call "
            "`super().train_step(data)`."
        )

    def apply_private_update(self, sums, variables, penalty_gradients, marks):
        """Takes one step of DiceSGD from the gradient sums of this replica.

        Args:
            sums: `GradientSums` of this replica's share of the batch.
            variables: The model's trainable variables, in the order of the sums.
            penalty_gradients: Gradient of the weight regularizers per variable, or `None`.
            marks: Int32 scalar from `provenance.count_marks`.

        Source: Zhang et al., ICLR 2024, Alg. 1 lines 5 to 7.
        """
        mechanism = self._mechanism
        self._check_variables_are_known(variables)
        used = [i for i, head in enumerate(sums.head) if head is not None]
        heads = [sums.head[i] for i in used]
        residuals = [] if sums.residual is None else [sums.residual[i] for i in used]
        # One dtype, because one all-reduce takes no mixture of them.
        *reduced, marks = distribution.sum_over_replicas(
            [*heads, *residuals, tf.cast(marks, tf.float32)]
        )
        heads, residuals = reduced[: len(used)], reduced[len(used) :]

        slots = [self._get_variable_index(variables[i]) for i in used]
        errors = [self.errors[slot] for slot in slots] if self.errors else []
        direction, new_errors = feedback.direction_and_errors(
            heads, residuals, [tf.convert_to_tensor(e.value) for e in errors], mechanism
        )
        if mechanism.noise_multiplier > 0:
            # Not `iterations`: they go back when weights are loaded, and the same noise on
            # other data would give two releases whose difference is free of noise.
            key, draws = self._private.noise_key.read(), self._private.noise_draws.value
            direction = [
                v + noise.gaussian_noise(key, draws, slot, v.shape, mechanism.noise_stddev)
                for v, slot in zip(direction, slots, strict=True)
            ]
        # The regularizers depend on no example: neither clipped nor noised.
        direction = [
            v if penalty_gradients[i] is None else v + tf.cast(penalty_gradients[i], tf.float32)
            for v, i in zip(direction, used, strict=True)
        ]
        record = provenance.update_record(self._sampling_record.value, marks)
        distribution.assign_on_every_replica(
            [*errors, self._sampling_record, self._private.noise_draws],
            [*new_errors, record, self._private.noise_draws.value + 1],
        )
        super().apply(direction, [variables[i] for i in used])

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        # Keras would add the direction up over replicas here. It is already the same on
        # all of them, noise included: adding it up would multiply it by their number.
        values = [getattr(v, "value", v) for v in trainable_variables]
        tf.__internal__.distribute.interim.maybe_merge_call(
            self._distributed_tf_update_step,
            self._distribution_strategy,
            list(zip(grads, values, strict=True)),
            learning_rate,
        )

    def load_own_variables(self, store):
        """Loads what may be released; the error, which never is, starts from 0."""
        super().load_own_variables(store)
        for error in self.errors:
            error.assign(tf.zeros(error.shape))
        # With a seed, a new process goes on where the saved one stopped.
        draws = self._private.noise_draws
        draws.assign(tf.maximum(draws.value, tf.cast(self._iterations.value, draws.dtype)))

    def get_config(self):
        """Returns the constructor's arguments, without `noise_seed`.

        The configuration is stored in saved models, and whoever knows the seed can
        subtract the noise.
        """
        config = super().get_config()
        for name in (
            "l2_norm_clip",
            "noise_multiplier",
            "expected_batch_size",
            "error_norm_clip",
            "bound_residuals",
            "clipping",
            "feedback_steps",
            "num_microbatches",
        ):
            config[name] = getattr(self._mechanism, name)
        config.update(
            chunk_size=self.chunk_size,
            gradient_engine=self.gradient_engine,
            self_check=self.self_check,
        )
        return config


@keras.saving.register_keras_serializable(package="dice_tf")
class DiceSGDOptimizer(PrivateUpdate, keras.optimizers.SGD):
    r"""Differentially private SGD with error feedback.

    One step, with \(h_i = \mathrm{clip}(g_i, C_1)\) and \(r_i = \mathrm{clip}(g_i - h_i, C_2)\):

    \[v^t = \tfrac1B\sum_i h_i + e^t, \qquad e^{t+1} = \tfrac1B\sum_i r_i, \qquad
      x^{t+1} = \mathrm{SGD}(x^t, v^t + w^t),\quad w^t \sim N(0, (z C_1 / B)^2 I).\]

    With `bound_residuals=False`, Alg. 1 of the paper to the letter:
    \(v^t = \frac1B\sum_i h_i + \mathrm{clip}(e^t, C_2)\) and
    \(e^{t+1} = e^t + \frac1B\sum_i g_i - v^t\). Its privacy cost is far higher, and is
    reported as such.

    Args:
        learning_rate: Float, schedule or callable, as in Keras. Defaults to Keras' 0.01.
        l2_norm_clip: Float > 0, \(C_1\): threshold of a per-example gradient's norm over
            all trainable variables.
        noise_multiplier: Float >= 0, \(z\): noise standard deviation on the sum of clipped
            gradients, divided by `l2_norm_clip`. From
            `accounting.calibrate_noise_multiplier`. 0 is not private and warns.
        expected_batch_size: Int, \(B\): the public divisor of all sums.
        error_norm_clip: Float >= 0, \(C_2\): threshold of a residual. Defaults to
            `l2_norm_clip`; 0 is DP-SGD (no error feedback).
        bound_residuals: Whether residuals are clipped per example (default), or the
            error when it is fed back.
        clipping: `"flat"`: one threshold for the whole gradient.
        feedback_steps: Int: residuals are fed back over this many steps.
        num_microbatches: Int or `None`: clip mean gradients of this many microbatches
            instead of per-example gradients, as in TF-Privacy. Doubles the sensitivity.
        chunk_size: Int or `None`: at most this many examples' gradients are computed at
            once. Bounds memory; changes nothing else.
        gradient_engine: `"auto"`, `"layerwise"` or `"vectorized"`.
        self_check: Whether the first batch of a compiled model is used to compare the
            gradients of a few examples with their gradients alone.
        noise_seed: Int or `None`: fixes the noise for reproducible tests. Whoever knows the
            seed can remove the noise, so leave it out for real data.
        **keras_arguments: Of `keras.optimizers.SGD`: `momentum`, `nesterov`,
            `weight_decay`, `use_ema`, `name`, ...

    Raises:
        MechanismError: If a privacy parameter is out of range.
        OptimizerArgumentError: If a Keras argument contradicts per-example clipping.

    Example:

    >>> optimizer = DiceSGDOptimizer(
    ...     learning_rate=0.5, momentum=0.9, l2_norm_clip=1.0, noise_multiplier=1.1,
    ...     expected_batch_size=64)
    >>> optimizer.mechanism.noise_stddev
    0.0171875

    Source: Zhang et al., "Differentially Private SGD Without Clipping Bias: An
    Error-Feedback Approach", ICLR 2024, Alg. 1.
    """


def _check_engine(gradient_engine, mechanism, chunk_size):
    if gradient_engine not in GRADIENT_ENGINES:
        raise GradientEngineError(
            f"Argument `gradient_engine` must be one of {GRADIENT_ENGINES}. "
            f"Received: gradient_engine={gradient_engine!r}."
        )
    if mechanism.num_microbatches is not None and gradient_engine == "layerwise":
        raise GradientEngineError(
            "gradient_engine='layerwise' clips examples, not microbatches. Received: "
            f"num_microbatches={mechanism.num_microbatches}. Use gradient_engine='vectorized', or "
            "leave `num_microbatches` out: clipping examples also needs half the noise."
        )
    if chunk_size is not None:
        check_integer("chunk_size", chunk_size, error=GradientEngineError)
        if chunk_size % mechanism.microbatch_size:
            raise GradientEngineError(
                f"Argument `chunk_size` must be a multiple of the {mechanism.microbatch_size} "
                f"examples of a microbatch. Received: chunk_size={chunk_size}."
            )
