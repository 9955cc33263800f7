# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The one place where Keras is made to take private steps.

Keras hands an optimizer only gradients that are already summed over the batch. So
constructing a private optimizer wraps methods of Keras' trainer once: `train_step`, to take
`private_train_step` instead; `make_train_function`, to check the gradients of the first batch;
`train_on_batch`, to make sparse batches dense; `fit` and two methods below it, so that several
replicas and workers take part in the same batches; and what files are made of
(`released_models`). Models whose optimizer is not private keep Keras' own.

The batches that gradients are compared on are taken from the pipeline of `fit` and handed back to
its steps: only there does one see what a `map` makes of rows, and a second iterator would use up
draws that no step trains on.
"""

import contextlib
import functools
import inspect
import itertools
import threading
import weakref

import keras
import tensorflow as tf
from tensorflow.python.eager import context as eager_context

from dice_tf.checkpoints import released_models
from dice_tf.checks import precision, unoptimised
from dice_tf.distribution import multi_worker, shared_backups, strategies
from dice_tf.errors import OptimizerArgumentError
from dice_tf.ledger import admission, fit_data, sampling_passes, units
from dice_tf.training import (
    class_weights,
    data_dependent_callbacks,
    dense,
    long_work,
    rebuilding,
)
from dice_tf.training.epsilon_callback import EpsilonCallback
from dice_tf.training.private_step import (
    compare_gradients,
    forget_outdated_checks,
    private_train_step,
)
from dice_tf.training.run import has_private_optimizer, is_private, run_of

_lock = threading.Lock()


def install():
    """Makes Keras' TensorFlow trainer take private steps for private optimizers.

    What others put on `keras.Model`, and take away again, stays above it.

    Idempotent and thread-safe.

    Raises:
        OptimizerArgumentError: If Keras does not run on TensorFlow.
        DistributionError: If the current strategy is not one for private training.
    """
    if keras.backend.backend() != "tensorflow":
        raise OptimizerArgumentError(
            "dice_tf trains with the TensorFlow backend of Keras. Received: "
            f"keras.backend.backend()={keras.backend.backend()!r}. Set the environment variable "
            "KERAS_BACKEND=tensorflow before importing keras."
        )
    strategies.check_strategy()
    precision.use_float32_products()
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

    of_models = keras.Model, released_models.METHODS
    with _lock:
        if getattr(TensorFlowTrainer.train_step, "dispatches_private_steps", False):
            return
        for owner, methods in ((TensorFlowTrainer, _METHODS), of_models):
            for name, method in methods.items():
                # Older versions of Keras have not all of these methods, nor the need for them.
                stock = getattr(owner, name, None)
                if stock is not None:
                    setattr(owner, name, _in_place_of(stock, method))
        setattr(TensorFlowTrainer.train_step, "dispatches_private_steps", True)


def _in_place_of(stock, method):
    """Returns a method that calls `method` with the stock one, then with its arguments."""

    @functools.wraps(stock)
    def wrapped(*args, **kwargs):
        return method(stock, *args, **kwargs)

    return wrapped


def _train_step(stock, self, data):
    optimizer = getattr(self, "optimizer", None)
    if is_private(getattr(optimizer, "inner_optimizer", None)):
        raise OptimizerArgumentError(
            f"{type(optimizer).__name__} wraps a private optimizer. It skips steps depending "
            "on the data, which would tell about them. Train in float32 or with the dtype "
            "policy 'mixed_bfloat16', which needs no loss scaling."
        )
    return private_train_step(self, data) if is_private(optimizer) else stock(self, data)


def _fit(stock, self, x=None, *args, **kwargs):
    if not has_private_optimizer(self):
        sampling_passes.warn_of_plain_steps(self)
        return stock(self, x, *args, **kwargs)
    given = inspect.signature(stock).bind(self, x, *args, **kwargs).arguments
    found = admission.sources(x)
    samplings = [source.sampling for source in found]
    units.check_data(self.optimizer.mechanism, found)
    rebuilding.build_again(self)
    multi_worker.align_samplers(self, x, samplings)
    multi_worker.check_workers_agree(self)
    callbacks = _listed(given.get("callbacks"))
    data_dependent_callbacks.warn_of(callbacks)
    callbacks = shared_backups.share_backups(self, callbacks)
    budgets = [callback for callback in callbacks if isinstance(callback, EpsilonCallback)]
    for budget in budgets:
        admission.check_claim(budget.sampling, x, found)
        budget.note_data(x, found, given.get("steps_per_epoch"))
    unaccounted = fit_data.unaccounted_pass(given, samplings, budgets)
    callbacks = sampling_passes.with_passes(callbacks, found, unaccounted, budgets)
    given["callbacks"] = _as_given(self, given.get("callbacks"), callbacks)
    dense.check_dense(given)
    claims = [*samplings, *(budget.sampling for budget in budgets)]
    fit_data.check_validation_split(given, claims)
    fit_data.check_rows(given, claims)
    if not claims:
        fit_data.warn_of_batch_size(given, self.optimizer.mechanism.expected_batch_size)
    if samplings:
        # Otherwise Keras warns that it will not shuffle, as if something were amiss.
        given.setdefault("shuffle", False)
    if given.get("class_weight"):
        given["x"] = class_weights.with_class_weights(
            given["x"], given.get("y"), given["class_weight"], bool(samplings)
        )
        if samplings:
            del given["class_weight"]
    with (
        _verbosity(run_of(self), given.get("verbose", "auto")),
        sampling_passes.steps_of_fit(self, found, budgets),
        fit_data.typed_errors(),
        class_weights.typed_errors(),
    ):
        return stock(**given)


@contextlib.contextmanager
def _verbosity(run, verbose):
    """Context in which the steps of a run may say what takes long, unless `verbose` is 0."""
    before, run.talks = run.talks, verbose != 0
    try:
        yield
    finally:
        run.talks = before


def _listed(callbacks):
    """Returns the callbacks of `fit` as a list, whichever of the forms that Keras takes it has."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks.callbacks
    return [] if callbacks is None else keras.tree.flatten(callbacks)


def _as_given(model, given, callbacks):
    """Returns a list of callbacks in the form in which `fit` was given some."""
    if not isinstance(given, keras.callbacks.CallbackList):
        return callbacks
    given.callbacks = callbacks
    given.set_model(model)
    return given


def _train_on_batch(stock, self, x, y=None, *args, **kwargs):
    if has_private_optimizer(self):
        x, y = dense.densify("x", x), dense.densify("y", y)
    return stock(self, x, y, *args, **kwargs)


def _maybe_symbolic_build(stock, self, iterator=None, data_batch=None):
    distributed = iterator is not None and self._distribute_strategy is not None
    if not distributed or not has_private_optimizer(self):
        return stock(self, iterator, data_batch)
    # From shapes alone: Keras takes the first batch, which would be lost to a sampler with
    # a seed, and which it cannot take from several workers.
    spec = strategies.spec_of_share(iterator._distributed_dataset.element_spec)
    with self.distribute_strategy.scope():
        self._symbolic_build(data_batch=spec)


def _make_function(stock, self, step_function):
    if has_private_optimizer(self):
        step_function = multi_worker.with_vector_logs(self, step_function)
        return _one_step_at_a_time(self, stock(self, step_function))
    return stock(self, step_function)


def _make_train_function(stock, self, force=False):
    private, run = has_private_optimizer(self), run_of(self)
    before, run.traced_for = run.traced_for, None
    if private:
        strategies.check_compilation(self)
        forget_outdated_checks(self)
        # Keras keeps the function when another optimizer is assigned without `compile`.
        run.traced_for = weakref.ref(self.optimizer), self.optimizer._private.generation
        force = force or before != run.traced_for
    stock(self, force or (before is not None and not private))
    if private and not hasattr(self.train_function, "checks_first"):
        self.train_function = _checking_first(self, self.train_function)
    return self.train_function


_METHODS = {
    "train_step": _train_step,
    "fit": _fit,
    "train_on_batch": _train_on_batch,
    "_maybe_symbolic_build": _maybe_symbolic_build,
    "_make_function": _make_function,
    "make_train_function": _make_train_function,
}


def _one_step_at_a_time(model, function):
    """Wraps a train or test function so that several replicas take its steps one by one.

    Keras' own loop over `steps_per_execution` puts a step into a condition, in which
    replicas cannot meet (keras-team/keras issue 19246).
    """

    @functools.wraps(function)
    def one_by_one(iterator):
        steps = model.steps_per_execution
        if steps > 1 and isinstance(iterator, tf.distribute.DistributedIterator):
            batches = list(itertools.islice(iterator, steps))
            if not batches:
                raise StopIteration
            iterator = iter(batches)
        return function(iterator)

    return one_by_one


def _checking_first(model, function):
    """Wraps a train function so that workers, then gradients, are checked before it steps."""
    is_first, optimizer, run = True, weakref.ref(model.optimizer), run_of(model)
    work = f"the gradients of model '{model.name}' with those of single examples"
    checking = f"dice_tf: comparing {work}, once before the first step."
    building = f"dice_tf: building the private step of model '{model.name}', once."
    function = _rewritten_once(function)

    @functools.wraps(function)
    def train_function(iterator):
        nonlocal is_first
        if model.optimizer is not optimizer():
            raise OptimizerArgumentError(
                f"The optimizer of model '{model.name}' was exchanged while it trains, but the "
                "compiled step is still that of the old one, whose steps nobody would count. "
                f"Received: optimizer={type(model.optimizer).__name__}. Call `compile` with the "
                "new optimizer, then `fit`."
            )
        # At every step, because TensorFlow takes new settings to steps that it compiled before.
        precision.check_float32_products()
        # A step compiled before a fork would go on with the key of both processes.
        model.optimizer._private.renew_keys_after_fork()
        if is_first:
            # Once more than `fit` does: callbacks may have restored a state since.
            multi_worker.check_workers_agree(model)
        if run.needs_comparison(model.optimizer):
            batches = list(itertools.islice(iterator, model.steps_per_execution))
            for batch in batches:
                if run.needs_comparison(model.optimizer):
                    with long_work.said(checking, run.talks):
                        compare_gradients(model, batch)
            if batches:
                iterator = _iterator_over(batches, iterator, model.distribute_strategy)
        talks, is_first = is_first and run.talks, False
        with long_work.said(building, True) if talks else contextlib.nullcontext():
            return function(iterator)

    setattr(train_function, "checks_first", True)
    return train_function


def _rewritten_once(function):
    """Wraps a train function so that TensorFlow makes it ready in less time."""
    context, before, options = eager_context.context(), None, None

    @functools.wraps(function)
    def train_function(iterator):
        nonlocal before, options
        # Another object after somebody has changed an option.
        if context.function_call_options is not before:
            before = context.function_call_options
            options = unoptimised.rewritten_once(before)
        outer, context.function_call_options = before, options
        try:
            return function(iterator)
        finally:
            context.function_call_options = outer

    return train_function


def _iterator_over(batches, iterator, strategy):
    """Returns an iterator over batches of the type of `iterator`, for which steps are traced."""
    if isinstance(iterator, tf.distribute.DistributedIterator):
        shares = sum((strategies.local_shares(strategy, batch) for batch in batches), [])
        data = _dataset_of(shares, strategies.spec_of_share(iterator.element_spec))
        return iter(strategy.distribute_datasets_from_function(lambda _: data))
    if not isinstance(iterator, tf.data.Iterator):
        return iter(batches)
    return iter(_dataset_of(batches, iterator.element_spec))


def _dataset_of(batches, spec):
    """Returns a data set of these batches with the types and shapes of `spec`.

    Not `from_generator`: a step that first runs on its batches gives the memory of its
    tensors back and fetches it anew, at that call and all later ones, which takes half as
    long again (seen with TensorFlow 2.21; benchmarks/README.md).
    """

    def as_specified(*batch):
        pairs = zip(tf.nest.flatten(batch), tf.nest.flatten(spec), strict=True)
        return tf.nest.pack_sequence_as(spec, [_with_shape(*pair) for pair in pairs])

    parts = [tf.data.Dataset.from_tensors(batch).map(as_specified) for batch in batches]
    options = tf.data.Options()
    # There is nothing to tune, and with busy cores the thread that tunes may hold up the end of
    # an iterator for as long as it has lived.
    options.autotune.enabled = False
    whole = functools.reduce(lambda left, right: left.concatenate(right), parts)
    return whole.with_options(options)


def _with_shape(leaf, spec):
    """Hides what is known of a tensor's shape beyond `spec`."""
    if not isinstance(spec, tf.TensorSpec):
        return leaf
    return tf.compat.v1.placeholder_with_default(leaf, spec.shape)
