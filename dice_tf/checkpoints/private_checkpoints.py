# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""Private checkpoints: what a run needs to go on bit for bit after it was killed.

Files are for release: they hold neither the error e nor the noise key. An optimizer with
`save_errors=True` adds both, the count of noise draws and the position of the sampler.
Whoever reads such a file can remove the noise, so it is as private as the data.

A file can be loaded twice, and the two runs may go apart: other data, another learning
rate. Were they to add the same noise, their difference would be free of it. So there are
two keys. The one that is in files, of steps taken with `save_errors=True`, is never used
but bound to what it is to hide,

\[w^t = \mathrm{Noise}(\mathrm{PRF}_{key}(v^t), t),\]

and runs repeat noise only as long as they repeat \(v^t\) to the last bit. The other one,
of all other steps, is used as it is, and neither it nor the count of its draws is ever
written or read. (A `noise_seed` decides both, in every process that is given it.)

Nothing simpler will do: a resumed process cannot know which steps the killed one still took after
it wrote the file. Bound to the direction, their replay is the identical release, and if anything
differs the noise is independent.
"""

import hashlib
from typing import Any
import warnings

import keras
import numpy as np
import tensorflow as tf

from dice_tf.checkpoints import bound_keys
from dice_tf.ledger import row_counts
from dice_tf.mechanism import noise
from dice_tf.training import rebuilding
from dice_tf.training.run import private_optimizer

__all__ = ["continue_sampling"]

_PREFIX = "private_"
# What `sampler` holds: digest of the sampling object's parameters (0: none), its 128 bits of
# entropy, the name of its group assignment, its position when the optimizer had made
# `steps` steps, these steps, and the fingerprint of the order of its rows (0: unknown).
_ENTROPY_WORDS = 4
SAMPLER_SIZE = _ENTROPY_WORDS + 5


class PrivateState:
    """What must not leave the process: the noise key, its use so far, and the error.

    A plain Python object, so that neither Keras nor `tf.train.Checkpoint` finds it.
    """

    def __init__(self, noise_seed):
        # Private files hold the first key and its count, and no file the second ones.
        # `provenance` has what each count is for.
        self.noise_key, self.process_key = noise.NoiseKey(noise_seed), noise.NoiseKey(noise_seed)
        self.noise_draws = self.process_draws = None
        # Draws of the second key that nobody used here; then steps of this object.
        self.draws_left_out, self.fit_ended_at, self.loop_steps_before = 0, 0, 0
        # From samplers with a seed to the last equal one, and the step at which its draws began.
        self.seeded = {}
        # Whether `fit` is what takes the steps, for Python and for compiled steps.
        self.is_in_fit, self.in_fit = False, None
        # The errors are those of this step; in any other state of the run they count as 0.
        self.error_step: Any = None
        self.errors = []
        # Factors of the thresholds that the errors were formed under, if those change.
        self.error_factors: Any = None
        self.sampler = None
        # How many rows epochs showed, see `row_counts`.
        self.row_counts = None
        # Fingerprint of the order of the rows that cyclic groups were drawn from.
        self.row_order = None
        # Digest of the owners that `fit` drew here, whose epsilon the run is about.
        self.owners = None
        # Whether all workers were found to hold the same optimizer.
        self.workers_agree = False
        # Whether anybody was told that steps were not accounted.
        self.is_reported = False
        # Slots of the update rule by variable and name, and how often they were put together.
        self.slots, self.generation = {}, 0
        # What was loaded into an optimizer that is not built yet, and the record it begins with.
        self.to_load: Any = None
        self.first_record: Any = None
        # What `continue_sampling` last wrote there; anything else came from a file.
        self.sampler_in_use = [0] * SAMPLER_SIZE

    def renew_keys_after_fork(self):
        """Gives a forked process keys of its own, also in steps that were compiled before."""
        for key in (self.noise_key, self.process_key):
            key.renew_after_fork()

    def make_counts(self):
        """Creates the variables that stay when the optimizer is built again."""
        self.noise_draws = count_variable("noise_draws", 0)
        self.process_draws = count_variable("process_draws", 0)
        self.row_counts = count_variable("row_counts", np.zeros(row_counts.SIZE))
        self.in_fit = count_variable("in_fit", int(self.is_in_fit))
        self.sampler = count_variable("sampler", np.zeros(SAMPLER_SIZE))

    def steps_here(self):
        """Returns the number of steps that this object took, in this process."""
        if self.process_draws is None:
            return 0
        return int(self.process_draws.numpy()) - self.draws_left_out

    def go_to_draw(self, number):
        """Leaves out draws of noise that another process with the same seed may have used."""
        self.draws_left_out += number - int(self.process_draws.numpy())
        self.process_draws.assign(number)

    def next_noise(self, direction, bound):
        """Returns the key and the number of the next draw of noise.

        Not `iterations`: they go back when weights are loaded, and the same noise on other data
        would give two releases whose difference is free of noise.

        Args:
            direction: List of tensors, what the noise is to hide.
            bound: Whether private files may make another process repeat this step.
        """
        if bound:
            return bound_keys.bind_key(self.noise_key.read(), direction), self.noise_draws.value
        return self.process_key.read(), self.process_draws.value

    def next_counts(self, iterations):
        """Returns pairs of a count of steps and its value after one more."""
        counts = [(count, count.value + 1) for count in (self.noise_draws, self.process_draws)]
        return [*counts, (self.error_step, tf.cast(iterations, tf.int64) + 1)]

    def set_in_fit(self, value):
        """Says whether `fit`, which knows where its batches come from, takes the next steps."""
        self.is_in_fit = value
        if self.in_fit is not None:
            self.in_fit.assign(int(value))


def count_variable(name, value):
    """Returns a variable of int64 that is the same on all replicas and in no file of Keras."""
    return keras.Variable(
        value, dtype="int64", trainable=False, aggregation="only_first_replica", name=name
    )


def private_variables(private, mechanism):
    """Returns the variables that a private checkpoint holds, by their names in it.

    The names contain a digest of the mechanism: under other parameters the accountant would
    be wrong about the error, so it is not found then.

    Args:
        private: `PrivateState` of a built optimizer.
        mechanism: Its `DiceMechanism`.

    Returns:
        Dict from name to variable.
    """
    names = ("noise_draws", "error_step", "sampler")
    variables = {name: getattr(private, name) for name in names}
    if private.error_factors is not None:
        variables["error_factors"] = private.error_factors
    variables.update({f"error_{i}": error for i, error in enumerate(private.errors)})
    if private.noise_key.seed is None:
        variables["noise_key"] = private.noise_key.variable
    prefix = f"{_PREFIX}{_digest(mechanism):016x}"
    return {f"{prefix}_{name}": variable for name, variable in variables.items()}


def trackable(private, mechanism):
    """Returns the same variables as an object that `tf.train.Checkpoint` can track."""
    module = tf.Module(name="private")
    for name, variable in private_variables(private, mechanism).items():
        # `tf.Module` looks for variables of TensorFlow.
        inner = variable.value if isinstance(variable, keras.Variable) else variable
        setattr(module, name, inner)
    return module


def save(private, mechanism, store):
    """Writes the private state to a store, and says so.

    Args:
        private: `PrivateState` of a built optimizer.
        mechanism: Its `DiceMechanism`.
        store: The store that Keras passes to `save_own_variables`.
    """
    values = private_variables(private, mechanism)
    _write_private({name: variable.numpy() for name, variable in values.items()}, store)


def updated(loaded, variables):
    """Returns what was loaded, with what was assigned since: a learning rate.

    Args:
        loaded: Dict of all that was in the file.
        variables: Those that an optimizer has before it is built, scalars all.
    """
    with tf.init_scope():
        since = {str(number): variable.numpy() for number, variable in enumerate(variables)}
    return {n: since.get(n, v) if np.shape(v) == () else v for n, v in loaded.items()}


def pass_on(loaded, save_errors, store):
    """Writes what was loaded into an optimizer that was not built since.

    Args:
        loaded: Dict of all that was in the file.
        save_errors: Whether to write its private part, too.
        store: The store that Keras passes to `save_own_variables`.
    """
    public = released(loaded)
    for name, value in public.items():
        store[name] = value
    if save_errors and len(public) < len(loaded):
        _write_private({n: v for n, v in loaded.items() if n not in public}, store)


def _write_private(values, store):
    warnings.warn(
        "This file holds the error and the noise key (save_errors=True): who reads it can remove "
        "the noise. Keep it as private as the data. To write files for release, set "
        "`model.optimizer.save_errors = False` first.",
        stacklevel=2,
    )
    for name, value in values.items():
        store[name] = value


def load(private, mechanism, store):
    """Reads the private state from a store, if it is there and of this mechanism.

    Args:
        private: `PrivateState` of a built optimizer.
        mechanism: Its `DiceMechanism`.
        store: The store that Keras passes to `load_own_variables`.

    Returns:
        Whether it was.
    """
    variables = private_variables(private, mechanism)
    there = {name: np.asarray(store[name]) for name in variables if name in store.keys()}
    shapes = {name: tuple(variable.shape) for name, variable in variables.items()}
    if {name: value.shape for name, value in there.items()} == shapes:
        for name, variable in variables.items():
            variable.assign(there[name])
        return True
    if any(name.startswith(_PREFIX) for name in store.keys()):
        warnings.warn(
            "The private state in this file is of a run with other privacy parameters, another "
            "model or another `noise_seed`, and is left out: the error starts from 0.",
            stacklevel=2,
        )
    return False


def released(store):
    """Returns the part of a store that is not private, as a dict."""
    return {name: store[name] for name in store.keys() if not name.startswith(_PREFIX)}


def build_optimizer(model):
    """Builds the optimizer of a built model: it takes what was loaded, and a record to write to."""
    if model.optimizer.built:
        rebuilding.build_again(model)
        return
    # Keras calls a model built whose `build` left its layers as they are.
    if all(layer.built for layer in model._flatten_layers()) and model.trainable_variables:
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)


def continue_sampling(model: keras.Model, sampling: Any) -> bool:
    """Makes private checkpoints of a model hold its sampler's position, or restores it.

    `fit` calls this before its first batch, after its callbacks loaded what they load. In
    a loop of your own call it before the first batch, and after loading.

    Args:
        model: Built Keras model compiled with a private optimizer.
        sampling: The object whose `dataset` feeds the model. If a private checkpoint was
            loaded, it takes over the secret entropy, the group assignment and the position
            stored there, and the next batch is the one that would have followed.

    Returns:
        Whether the next batch follows on the last step. `False` on a fresh run, without
        `save_errors=True`, and if the sampling has other parameters than the stored one.

    Raises:
        PlainGradientsError: If the optimizer is not private.

    Example:

    >>> import dice_tf, keras
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> model.compile(dice_tf.DiceSGDOptimizer(
    ...     l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=8, save_errors=True),
    ...     loss="mse")
    >>> sampling = dice_tf.PoissonSampling(num_examples=80, expected_batch_size=8)
    >>> continue_sampling(model, sampling)  # From the start.
    False
    """
    optimizer = private_optimizer(model, "position in its draws to continue from")
    if not optimizer.save_errors:
        return False
    build_optimizer(model)
    if not optimizer.built:
        return False
    private, identity = optimizer._private, _digest(sampling)
    steps = int(optimizer.iterations.numpy())
    stored = private.sampler.numpy().tolist()
    stored_identity, *words, assignment, position, position_steps, row_order = stored
    position += steps - position_steps
    if stored_identity == identity and stored != private.sampler_in_use:
        private.row_order = row_order or None
        entropy = sum(word << 32 * i for i, word in enumerate(words))
        follows = sampling.move_to(entropy, assignment, position)
    else:
        here = identity, sampling.assignment, sampling.position
        follows = (stored_identity, assignment, position) == here
        if not follows:
            sampling.start_whole_pass()
    words = [sampling.entropy >> 32 * i & 0xFFFFFFFF for i in range(_ENTROPY_WORDS)]
    order = private.row_order or 0
    _write(private, [identity, *words, sampling.assignment, sampling.position, steps, order])
    # Without a position, a resumed run draws afresh, and is not the same to the last bit.
    sampling.watch(lambda: _write(private, [0] * SAMPLER_SIZE))
    return follows


def note_row_order(private, row_order):
    """Remembers in which order the rows come from now on, also for private files.

    Args:
        private: `PrivateState` of an optimizer.
        row_order: `admission.row_order` of the data, `None` if it means nothing.
    """
    if row_order is not None:
        private.row_order = row_order
        if any(private.sampler_in_use):
            _write(private, [*private.sampler_in_use[:-1], row_order])


def _write(private, values):
    private.sampler_in_use = values
    private.sampler.assign(np.asarray(values, dtype=np.int64))


def _digest(value):
    """Returns 63 bits that tell values of different `repr` apart."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "little") >> 1
