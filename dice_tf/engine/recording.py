# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Records which layer calls of a forward pass account for which trainable weights.

Every layer with trainable weights is watched while the model runs. A weight is accounted
for by the innermost layer call that read it with examples along the first axis of its
inputs and outputs. What no such call accounts for (a kernel read in `Model.call`, a
layer called on positions only, at the top of the model) is refused, by name.
"""

import contextlib
import dataclasses
import functools
import threading
from typing import Any

import keras
import keras.src
import tensorflow as tf
from tensorflow.python.eager import record as tf_record

from dice_tf.engine import random_replay, rematerialization, rules
from dice_tf.engine.folded_axes import folded_layers
from dice_tf.engine.overrides import overridden
from dice_tf.errors import GradientEngineError

_current = threading.local()
# Their reads of a kernel prepare its next value and are not differentiated.
_READS_WITHOUT_GRADIENT = (keras.layers.SpectralNormalization,)


@dataclasses.dataclass(eq=False)
class LayerCall:
    """One call of a layer, and what came of it. This is what a rule is given.

    Attributes:
        layer: The Keras layer.
        args: Positional arguments of `layer.call`; tensors have the batch axis first.
        kwargs: Keyword arguments of `layer.call` (`training` and `mask` filled in).
        cotangents: Gradient of the summed loss with respect to the layer's output, or to
            the input of its activation if the rule asks for that. A tensor of the same
            shape, or a list of tensors if the layer has several outputs.
        variables: Trainable variables that this call accounts for.
    """

    layer: keras.layers.Layer
    args: tuple
    kwargs: dict
    variables: list
    rule: Any = None
    watched: list = dataclasses.field(default_factory=list)
    cotangents: Any = None
    training: Any = None
    state: list = dataclasses.field(default_factory=list)
    draws: list = dataclasses.field(default_factory=list)
    remembered: Any = None

    @property
    def inputs(self):
        """First argument of the call."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()))

    @property
    def path(self):
        """Path of the layer, for messages."""
        return self.layer.path or self.layer.name


class _Reads:
    """Which trainable variables are read.

    Not a tape: under two of them TensorFlow wraps every loop in a function that puts out all
    intermediate values and zeros for their gradients.
    """

    def __init__(self):
        self._variables, self._watcher = [], None

    def __enter__(self):
        self._watcher = tf_record.VariableWatcher()
        self._watcher.__enter__()
        return self

    def __exit__(self, *exception):
        self._watcher.__exit__(*exception)
        self._variables += self._watcher.watched_variables()

    @contextlib.contextmanager
    def paused(self):
        """Reads inside are not of this call."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def variables(self):
        """Returns what was read."""
        return self._variables


class _Frame:
    """A layer call that is going on."""

    def __init__(self, layer=None, rule=None, first_call=0, first_draw=0):
        self.layer, self.rule = layer, rule
        self.first_call, self.first_draw = first_call, first_draw
        self.reads = _Reads()
        self.claimed = {}  # id -> variable of calls inside that could not account for it
        self.before_activation = []
        self.remembered = None


class Recorder:
    """Context manager that records the layer calls of this thread.

    Args:
        model: A built Keras model.
        tape: Gradient tape that is recording; it will watch the recorded outputs.
        batch: Static size of the leading axis that marks a batch of examples; `None` if
            the batch axis, and only that, has unknown size.
        x: Inputs of the batch.
    """

    def __init__(self, model, tape, batch, x):
        self.calls = []
        self._model, self._tape, self._batch, self._x = model, tape, batch, x
        self._trainable = {id(v._value): v for v in model.trainable_variables}
        self._draws = random_replay.RecordedDraws()
        self._frames = []
        self._reasons = {}
        self._stack = contextlib.ExitStack()
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def __enter__(self):
        layers = _layers_with(self._model, self._trainable)
        # Where the batch axis is known by its size, shapes tell.
        unknown = self._batch is None
        self._folded = _folded(self._model, self._x, layers) if unknown else frozenset()
        self._owned = {id(layer): {id(v._value) for v in layer.variables} for layer in layers}
        with contextlib.ExitStack() as stack:
            stack.enter_context(overridden(_hooks(self._model, layers)))
            stack.enter_context(random_replay.listening(self._draws))
            stack.enter_context(_recording(self))
            self._frames.append(_Frame())
            stack.enter_context(self._frames[0].reads)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception):
        self._stack.__exit__(*exception)

    def handles(self, layer):
        """Whether calls of this layer are recorded."""
        return id(layer) in self._owned

    def finished_calls(self):
        """Returns the recorded calls after checking that they account for every read.

        Raises:
            GradientEngineError: If a trainable weight was read where no call accounts
                for it.
        """
        root = self._frames[0]
        unaccounted = {**self._reads(root), **root.claimed}
        for key, variable in unaccounted.items():
            reason = self._reasons.get(key, "it is read outside the layer that owns it")
            raise GradientEngineError(
                f"Weight '{variable.path}' has no per-example gradient: {reason}. Move the "
                "computation into a layer whose inputs and outputs have the batch axis first, use "
                "TimeDistributed for frames and ReversibleEmbedding for tied embeddings, or set "
                "gradient_engine='vectorized'."
            )
        return [call for call in self.calls if call.variables]

    def record(self, layer, function, args, kwargs):
        """Runs a layer's `call` and records it."""
        outer = self._frames[-1]
        rule = rules.rule_for(layer, function, args, kwargs)
        frame = _Frame(layer, rule, len(self.calls), len(self._draws.draws))
        # A recomputation must start from the state that this call found.
        # Not `non_trainable_variables`: a frozen layer counts its trained sublayers' there.
        kept = [v for v in layer.variables if id(v._value) not in self._trainable]
        state = [(v, tf.identity(v._value)) for v in kept]
        self._frames.append(frame)
        try:
            with outer.reads.paused(), frame.reads:
                outputs = self._run(frame, function, args, kwargs)
        finally:
            self._frames.pop()
        variables = {**self._reads(frame), **frame.claimed}
        if isinstance(layer, _READS_WITHOUT_GRADIENT):
            variables = dict(frame.claimed)
        if not variables:
            return outputs
        return self._account(frame, outer, variables, state, args, kwargs, outputs)

    def _run(self, frame, function, args, kwargs):
        if not (frame.rule and frame.rule.run):
            return function(*args, **kwargs)

        def watch(tensor):
            frame.before_activation.append(self._watch(tensor))
            return frame.before_activation[-1]

        outputs, frame.remembered = frame.rule.run(frame.layer, function, args, kwargs, watch)
        return outputs

    def before_activation(self, layer, tensor):
        """Watches the input of a layer's activation if its rule wants that."""
        frame = self._frames[-1]
        if frame.layer is not layer or not (frame.rule and frame.rule.before_activation):
            return tensor
        # What Keras' own layers hand to their activation they use for nothing else. A copy would
        # keep the activation from being fused with the product before it.
        copied = not type(layer).__module__.startswith("keras.")
        frame.before_activation.append(self._watch(tensor, copied))
        return frame.before_activation[-1]

    def _reads(self, frame):
        read = (id(v) for v in frame.reads.variables())
        return {key: self._trainable[key] for key in read if key in self._trainable}

    def _account(self, frame, outer, variables, state, args, kwargs, outputs):
        layer = frame.layer
        if frame.rule:
            foreign = {k: v for k, v in variables.items() if k not in self._owned[id(layer)]}
            variables = {k: v for k, v in variables.items() if k not in foreign}
            outer.claimed.update(foreign)
        refusal = self._refusal(frame, args, kwargs, outputs)
        if refusal:
            self._reasons.update(dict.fromkeys(variables, refusal))
            outer.claimed.update(variables)
            return outputs
        for call in self.calls[frame.first_call :]:
            call.variables = [v for v in call.variables if id(v._value) not in variables]
        if frame.rule and frame.rule.before_activation:
            watched = frame.before_activation
        else:
            outputs = keras.tree.map_structure(self._watch, outputs)
            watched = [t for t in keras.tree.flatten(outputs) if _is_float(t)]
        self.calls.append(
            LayerCall(
                layer, args, kwargs, list(variables.values()), frame.rule, watched,
                training=_training(layer, kwargs), state=state,
                draws=self._draws.draws[frame.first_draw:], remembered=frame.remembered,
            )
        )  # fmt: skip
        return outputs

    def _refusal(self, frame, args, kwargs, outputs):
        """Why a call cannot account for what it read, or `None`."""
        layer = frame.layer
        name = f"layer '{layer.path or layer.name}' ({type(layer).__name__})"
        if self._graph is not None and tf.compat.v1.get_default_graph() is not self._graph:
            return f"{name} is called inside a loop, a branch or a tf.function of its own"
        if isinstance(layer, _READS_WITHOUT_GRADIENT):
            return f"{name} changes the weight in every call"
        if layer in self._folded:
            return f"{name} is called with other items folded into the batch axis"
        inputs = [t for t in tf.nest.flatten((args, kwargs)) if tf.is_tensor(t)]
        floats = [t for t in keras.tree.flatten(outputs) if _is_float(t)]
        if frame.rule and frame.rule.before_activation and len(frame.before_activation) != 1:
            return f"{name} did not call its activation exactly once"
        if frame.rule:
            inputs = inputs[:1]
        batched = all(map(self._is_batched, floats)) and any(map(self._is_batched, inputs))
        if not batched:
            shapes = [tuple(t.shape) for t in (*inputs, *floats)]
            return f"{name} is called without the batch axis first (shapes {shapes})"
        return None

    def _is_batched(self, tensor):
        rank = tensor.shape.rank
        return rank is not None and rank > 0 and tensor.shape[0] == self._batch

    def _watch(self, tensor, copied=True):
        if not _is_float(tensor):
            return tensor
        watched = tf.identity(tensor) if copied else tensor
        mask = getattr(tensor, "_keras_mask", None)
        if mask is not None:
            watched._keras_mask = mask
        if self._graph is None or tf.compat.v1.get_default_graph() is self._graph:
            self._tape.watch(watched)
        return watched


def _is_float(tensor):
    return tf.is_tensor(tensor) and tensor.dtype.is_floating


def _training(layer, kwargs):
    if kwargs.get("training") is not None:
        return kwargs["training"]
    context = layer._get_call_context()
    get = getattr(context, "get_value", None)
    return get("training") if get else context.training


@contextlib.contextmanager
def _recording(recorder):
    outer = getattr(_current, "recorder", None)
    _current.recorder = recorder
    try:
        yield
    finally:
        _current.recorder = outer


def _layers_with(model, trainable):
    """Layers below `model` that hold trainable weights, themselves or further down."""
    found, seen = [], {id(model)}

    def visit(layer):
        for child in layer._layers:
            if id(child) in seen:
                continue
            seen.add(id(child))
            # Not its `trainable_variables`, which a frozen layer with trained sublayers hides.
            if not any(id(v._value) in trainable for v in child.variables):
                continue
            # Functional models only pass tensors on; they read no weight themselves.
            if not isinstance(child, (keras.Sequential, keras.src.models.Functional)):
                found.append(child)
            # The cell of an RNN runs inside its loop: the RNN is one unit.
            if not isinstance(child, keras.layers.RNN):
                visit(child)

    visit(model)
    return found


def _folded(model, x, layers):
    @contextlib.contextmanager
    def probing(probe):
        with overridden(_hooks(model, layers)), _recording(probe):
            yield

    return folded_layers(model, x, layers, probing)


def _hooks(model, layers):
    """Replacements that report layer calls to the recorder of the calling thread."""
    replacements = [*random_replay.interceptions(), *rematerialization.interceptions()]
    for layer in model._flatten_layers():
        if getattr(layer, "_remat_mode", None):
            # Rematerialised calls run again in the backward pass, out of our sight.
            replacements.append((layer, "_remat_mode", lambda mode: None))
    for layer in layers:
        quantized = getattr(layer, "quantization_mode", None) is not None
        name = "quantized_call" if quantized else "call"
        replacements.append((layer, name, functools.partial(_reporting_call, layer)))
        if rules.wants_activation_input(layer):
            make = functools.partial(_reporting_activation, layer)
            replacements.append((layer, "activation", make))
    return replacements


def _reporting_call(layer, function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        recorder = getattr(_current, "recorder", None)
        if recorder is None or not recorder.handles(layer):
            return function(*args, **kwargs)
        return recorder.record(layer, function, args, kwargs)

    return call


def _reporting_activation(layer, activation):
    def activate(tensor):
        recorder = getattr(_current, "recorder", None)
        if recorder is not None and recorder.handles(layer):
            tensor = recorder.before_activation(layer, tensor)
        return tensor if activation is None else activation(tensor)

    return activate
