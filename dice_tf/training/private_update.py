# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`PrivateUpdate`: what makes a Keras optimizer class private.

A private optimizer is a Keras optimizer whose update rule only ever sees the noised
direction \\(v + w\\). What a Keras rule computes from it (momentum, schedules, weight
decay, averages) is post-processing and costs no privacy.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal
import warnings

import keras
import numpy as np
import tensorflow as tf

from dice_tf.checkpoints import private_checkpoints
from dice_tf.distribution import strategies
from dice_tf.errors import (
    DistributionError,
    OptimizerArgumentError,
    PlainGradientsError,
    SamplingError,
)
from dice_tf.ledger import provenance, row_counts
from dice_tf.mechanism import (
    PRIVACY_ARGUMENTS,
    DiceMechanism,
    PiecewiseSchedule,
    adaptive,
    clip_rules,
    feedback,
    noise,
)
from dice_tf.training import (
    error_slots,
    keras_trainer,
    optimizer_arguments,
    rebuilding,
    thresholds,
)

if TYPE_CHECKING:
    from dice_tf.mechanism.clipping import Clip
    from dice_tf.plan import PrivacyPlan


class PrivateUpdate(keras.optimizers.Optimizer if TYPE_CHECKING else object):
    """Mixin that turns a Keras optimizer class into a private one.

    The order of bases matters: `class MyOptimizer(PrivateUpdate, keras.optimizers.X)`.
    Use `make_dice_optimizer_class`; see `DiceSGDOptimizer` for the arguments.
    """

    def __init__(
        self,
        learning_rate: Any = None,
        *positional: Any,
        l2_norm_clip: float | None = None,
        noise_multiplier: float | None = None,
        expected_batch_size: int | None = None,
        error_norm_clip: float | None = None,
        bound_residuals: bool | None = None,
        clipping: str | Clip | None = None,
        feedback_steps: int | None = None,
        num_microbatches: int | None = None,
        rows_per_unit: int | None = None,
        schedule: PiecewiseSchedule | None = None,
        plan: PrivacyPlan | None = None,
        chunk_size: int | Literal["auto"] | None = "auto",
        gradient_engine: str = "auto",
        self_check: bool = True,
        rescale_to_unit_norm: bool = False,
        save_errors: bool = False,
        noise_seed: int | None = None,
        **keras_arguments: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in PRIVACY_ARGUMENTS}
        optimizer_arguments.check_none_positional(type(self), learning_rate, positional)
        for name, value in keras_arguments.items():
            optimizer_arguments.check_keras_argument(name, value)
        if clipping is not None:
            given["clipping"] = clip_rules.canonical(clipping)
        mechanism = DiceMechanism(
            **optimizer_arguments.with_plan(plan, given), noise_is_secret=noise_seed is None
        )
        optimizer_arguments.check_engine(gradient_engine, mechanism, chunk_size)
        optimizer_arguments.check_noise_bias(mechanism, keras_arguments, rescale_to_unit_norm)
        if mechanism.noise_multiplier == 0:
            warnings.warn(
                "noise_multiplier=0: training is not private, its epsilon is infinite.",
                stacklevel=2,
            )
        if learning_rate is not None:
            keras_arguments["learning_rate"] = learning_rate
        super().__init__(**keras_arguments)
        self._private = private_checkpoints.PrivateState(noise_seed)
        self.chunk_size = chunk_size
        self.gradient_engine = gradient_engine
        self.self_check = bool(self_check)
        self.rescale_to_unit_norm = bool(rescale_to_unit_norm)
        self.save_errors = bool(save_errors)
        self._mechanism = mechanism
        keras_trainer.install()

    def __setattr__(self, name, value):
        if hasattr(self, "_mechanism"):
            if name == "loss_scale_factor":
                # Keras does this, to None, when it wraps an optimizer.
                raise OptimizerArgumentError(
                    f"The loss scale of {type(self).__name__} cannot be set, as LossScaleOptimizer "
                    "and MultiOptimizer do to an optimizer that they wrap: the first skips steps "
                    "depending on the data, which would tell about them, and both take gradients "
                    f"of a whole batch. Received: loss_scale_factor={value!r}. Under the dtype "
                    "policy 'mixed_float16' `compile` does so: use 'mixed_bfloat16', or "
                    "`compile(auto_scale_loss=False)`."
                )
            optimizer_arguments.check_not_fixed(type(self), name, value)
            optimizer_arguments.check_keras_argument(name, value)
        super().__setattr__(name, value)
        if name == "save_errors":
            self._track_private_state()

    def __getattr__(self, name):
        # For names that are not found; `object` has the error that says so.
        owner = self._mechanism if name in PRIVACY_ARGUMENTS else self
        return object.__getattribute__(owner, name)

    @property
    def mechanism(self) -> DiceMechanism:
        """The `DiceMechanism`: every parameter of this optimizer that enters epsilon.

        Its `noise_is_secret` is that of the whole run, steps of loaded files included.
        """
        # A step that is being traced cannot read the record, and needs no more than this.
        if self.built and tf.executing_eagerly():
            if provenance.unpack_record(self._sampling_record.numpy())["seeded_steps"]:
                return dataclasses.replace(self._mechanism, noise_is_secret=False)
        return self._mechanism

    @property
    def errors(self) -> list[Any]:
        """The error e: float32 variables of the trainable variables' shapes, private.

        With s = `feedback_steps`, s for each trainable variable: first the residual means of
        the last step, one per variable, then those of the step before it, and so on. Empty
        if `error_norm_clip` is 0, because then nothing is fed back.
        """
        return list(self._private.errors)

    @property
    def sampling_record(self) -> Any:
        """What `dice_tf.ledger.provenance` knows about how the batches so far were drawn."""
        return self._sampling_record

    def build(self, variables):
        """Creates the Keras slots, the error slots and the sampling record.

        For variables that it was not built with an optimizer is built again: the record and
        all counts go on, and the errors of variables that are left out are forgotten.

        Raises:
            ModelError: If the gradient of a variable is not a gradient but its new value.
            DistributionError: If the weights are to be overwritten by their average, which
                Keras cannot do on several replicas.
        """
        # Keras loads the legacy .h5 format with none, and leaves an optimizer that cannot train.
        if not variables or rebuilding.is_built_for(self, variables):
            return
        optimizer_arguments.check_variables(variables)
        replicas = self._distribution_strategy.num_replicas_in_sync
        if self.use_ema and self.ema_overwrite_frequency and replicas > 1:
            raise DistributionError(
                "Keras cannot overwrite weights by their average within a step of several "
                f"replicas. Received: ema_overwrite_frequency={self.ema_overwrite_frequency} with "
                f"{replicas} replicas. Leave it out: `fit` overwrites them when it ends."
            )
        known = self.variables
        private, steps = self._private, 0
        again = rebuilding.unbuild(self) if self.built else None
        super().build(variables)
        if self._mechanism.error_norm_clip > 0:
            private.errors = error_slots.add(self, variables)
        if again is None:
            private.make_counts()
            known_record = private.first_record
            first: Any = provenance.initial_record() if known_record is None else known_record
            start: Any = keras.initializers.Constant(first)
            self._sampling_record = self.add_variable(
                shape=(provenance.RECORD_SIZE,),
                initializer=start,
                dtype="int32",
                name="sampling_record",
                aggregation="only_first_replica",
            )
        else:
            steps = int(self._iterations.numpy())
            self._track_variable(self._sampling_record)
            # Under thresholds that moved, layers may have other shares by now.
            rebuilding.restore_errors(self, {} if self._mechanism.moves else again)
        thresholds.build(self, variables)
        private.error_step = private_checkpoints.count_variable("error_step", steps)
        self._track_private_state()
        if self._private.to_load is not None:
            self.load_own_variables(private_checkpoints.updated(self._private.to_load, known))
            self._private.to_load = None

    def _track_private_state(self):
        # Of all that looks for variables only `tf.train.Checkpoint` finds those of a module.
        if self.built and self.save_errors:
            self._private_module = private_checkpoints.trackable(self._private, self._mechanism)
        elif hasattr(self, "_private_module"):
            del self._private_module

    def add_variable_from_reference(self, reference_variable, name=None, initializer="zeros"):
        """Returns a slot of the update rule; one that was made before, if there is one."""
        slots, key = self._private.slots, (self._var_key(reference_variable), name)
        if key in slots:
            self._track_variable(slots[key])
            return slots[key]
        slots[key] = super().add_variable_from_reference(
            reference_variable, name=name, initializer=initializer
        )
        if name == "average" and int(self._iterations.numpy()):
            # Keras begins averages at the first step of the optimizer, not of the variable.
            slots[key].assign(reference_variable)
        return slots[key]

    def apply(self, grads, trainable_variables=None):
        """Refuses: gradients of a batch were not clipped per example.

        Raises:
            PlainGradientsError: Always. Private updates come from
                `dice_tf.private_train_step`, which `fit` and `train_on_batch` use.
        """
        raise PlainGradientsError(
            f"{type(self).__name__} received gradients that were summed over a batch, so the "
            "influence of one example on them is not bounded. In a custom training loop call "
            "`dice_tf.private_train_step(model, batch)` instead of `tape.gradient` and "
            "`apply_gradients`, with all three elements of the sampler's batch, (x, y, weights): "
            "weight 0 marks padding. A model whose `train_step` is overridden must call "
            "`super().train_step(data)`."
        )

    def apply_private_update(
        self, sums, variables, penalty_gradients, marks, rows, groups=None, present=None
    ):
        """Takes one step of DiceSGD from the gradients of this replica.

        Args:
            sums: `GradientSums` of this replica's share of the batch, over `mechanism.divisor`.
            variables: The model's trainable variables, in the order of the sums.
            penalty_gradients: Gradient of the weight regularizers per variable, or `None`.
            marks: Int32 scalar from `provenance.count_marks`.
            rows: Scalar, the number of this replica's rows of nonzero weight.
            groups: What `mechanism.clip.groups` returned for the model.
            present: Float32 `[units]`, 0 for this replica's units of padding; for adaptive
                thresholds.

        Source: Zhang et al., ICLR 2024, Alg. 1 lines 5 to 7.
        """
        mechanism, private = self._mechanism, self._private
        self._check_variables_are_known(variables)
        now = thresholds.current(self, groups, variables)
        is_adaptive = isinstance(mechanism.clip, adaptive.AdaptiveClipping)
        used = [i for i, head in enumerate(sums.head) if head is not None]
        heads = [sums.head[i] for i in used]
        residuals = [] if sums.residual is None else [sums.residual[i] for i in used]
        # One dtype, because one all-reduce takes no mixture of them.
        counts = [tf.cast(count, tf.float32) for count in (marks, rows)]
        within = []
        if is_adaptive:
            within = [
                adaptive.unclipped_counts(sums.norms, present, mechanism, groups, now.factors)
            ]
        *reduced, marks, rows = strategies.sum_over_replicas([*heads, *residuals, *within, *counts])
        heads, residuals = reduced[: len(used)], reduced[len(used) : len(used) + len(residuals)]
        within = reduced[len(heads) + len(residuals) :]

        slots = [self._get_variable_index(variables[i]) for i in used]
        errors, forgotten = error_slots.used_and_others(self, slots)
        values = error_slots.values(self, errors)
        values = thresholds.rescaled(self, values, slots, now, groups, variables)
        direction, new_errors = feedback.direction_and_errors(heads, residuals, values, mechanism)
        noisy, stddev = None, mechanism.noise_stddev
        stddev = stddev if now is None else stddev * now.noise
        if mechanism.noise_multiplier > 0 or is_adaptive:
            # All that the noise is to hide, and its scale.
            scale = [] if now is None else [now.noise]
            key, draws = private.next_noise([*direction, *within, *scale], bound=self.save_errors)
            if is_adaptive:
                noisy = thresholds.noisy_counts(self, within[0], groups, key, draws)
        if mechanism.noise_multiplier > 0:
            by_slot = dict(zip(slots, direction, strict=True))
            direction = list(noise.add_noise(by_slot, key, draws, stddev).values())
        if self.rescale_to_unit_norm:
            unit = mechanism.l2_norm_clip * (1.0 if now is None else now.total)
            direction = [v / unit for v in direction]
        # The regularizers depend on no example: neither clipped, noised nor rescaled.
        direction = [
            v if penalty_gradients[i] is None else v + tf.cast(penalty_gradients[i], tf.float32)
            for v, i in zip(direction, used, strict=True)
        ]
        in_fit = private.in_fit.value > 0
        name = provenance.mechanism_name(mechanism)
        record = provenance.update_record(
            self._sampling_record.value, marks, mechanism.noise_is_secret, name, in_fit
        )
        counts = row_counts.update(private.row_counts.value, marks, rows, in_fit)
        updates = [
            *zip(errors, new_errors, strict=True),
            *((error, tf.zeros(error.shape)) for error in forgotten),
            (self._sampling_record, record),
            (private.row_counts, counts),
            *private.next_counts(self._iterations.value),
            *thresholds.updates(self, now, noisy, groups, variables),
        ]
        # TensorFlow runs what needs no data also when the data have come to an end, and Keras
        # may find out about the end by a step on no data (without XLA).
        with tf.control_dependencies([heads[0]]):
            strategies.assign_on_every_replica(*map(list, zip(*updates)))
            super().apply(direction, [variables[i] for i in used])

    def _all_reduce_sum_gradients(self, grads_and_vars):
        # Keras would add the direction up over replicas here. It is already the same on
        # all of them, noise included: adding it up would multiply it by their number.
        return grads_and_vars

    def save_own_variables(self, store):
        """Saves what may be released, and with `save_errors` the private state, which warns."""
        private = self._private
        if private.to_load is not None:
            waiting = private_checkpoints.updated(private.to_load, self.variables)
            private_checkpoints.pass_on(waiting, self.save_errors, store)
            return
        super().save_own_variables(store)
        if self.built and self.save_errors:
            private_checkpoints.save(private, self._mechanism, store)

    def load_own_variables(self, store):
        """Loads what there is; the error starts from 0 unless the file is private.

        Raises:
            SamplingError: If the file has a sampling record of another version, or is of an
                optimizer with other variables.
        """
        if not self.built:
            # Keras would drop it all with a warning, and with it the steps that epsilon counts.
            self._private.to_load = {name: np.asarray(store[name]) for name in store.keys()}
            for number, variable in enumerate(self.variables):
                value = self._private.to_load.get(str(number))
                if value is not None and np.shape(value) == variable.shape:
                    variable.assign(value)
            return
        private, released = self._private, private_checkpoints.released(store)
        if len(released) != len(self.variables) and np.any(released.get("0", 0)):
            # Keras would load the model's weights alone, with a warning. The steps that made
            # them contradict the record from now on, so that nobody says their epsilon.
            self._iterations.assign(released.get("0", 0))
            raise SamplingError(
                f"The optimizer in this file has {len(released)} variables, and this one "
                f"({type(self).__name__}) has {len(self.variables)}, so it cannot take over the "
                "count of steps that epsilon needs. Compile with the arguments of the saved one "
                "(momentum, `use_ema`, ...), or load with `compile=False`, or `load_weights` "
                "before `compile`, and compose its training with the next by "
                "`accounting.compose_epsilon`."
            )
        for number, variable in enumerate(self.variables):
            if variable is self._sampling_record and str(number) in released:
                provenance.check_layout(released[str(number)])
        super().load_own_variables(released)
        steps = int(self._iterations.numpy())
        if not (self.save_errors and private_checkpoints.load(private, self._mechanism, store)):
            for error in self.errors:
                error.assign(tf.zeros(error.shape))
            private.noise_draws.assign(max(steps, int(private.noise_draws.numpy())))
        # With a seed, a new process goes on where the saved one stopped.
        private.go_to_draw(max(steps, int(private.process_draws.numpy())))

    def set_weights(self, weights: Any) -> None:
        """Loads the values of `variables`, as Keras hands them over from the .h5 format."""
        self.load_own_variables({str(i): np.asarray(w) for i, w in enumerate(weights)})

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, without `noise_seed`.

        The configuration is stored in saved models, and whoever knows the seed can
        subtract the noise.
        """
        of_steps = ("chunk_size", "gradient_engine", "self_check", "rescale_to_unit_norm")
        names = (*PRIVACY_ARGUMENTS, *of_steps, "save_errors")
        config = {**super().get_config(), **{name: getattr(self, name) for name in names}}
        config["clipping"] = clip_rules.config_of(config["clipping"])
        if config["schedule"] is not None:
            config["schedule"] = config["schedule"].get_config()
        return config
