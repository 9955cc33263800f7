# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds layers that are called on rows that are not examples.

A reshape to `(-1, features)` folds frames or instances into the batch axis. In a graph that
axis has unknown size before and after, so nobody sees the difference. With a size that no
other axis has, shapes alone tell, and nothing is computed.
"""

import weakref

import keras

from dice_tf.engine.loss import call_in_training

# Any number that no real axis is likely to have, nor to be a multiple of.
_PROBE_BATCH_SIZE = 1021
_KNOWN_MODULES = ("keras.src.layers.", "keras.src.models.sequential", "keras.src.models.functional")

# Model -> {specification of its inputs: set of layers}.
_found = weakref.WeakKeyDictionary()


class FirstAxes:
    """Notes layers whose tensors have a first axis of known size that is not the batch's."""

    def __init__(self, layers):
        self._watched = {id(layer) for layer in layers}
        self.folded = weakref.WeakSet()

    def handles(self, layer):
        """Whether calls of this layer are looked at."""
        return id(layer) in self._watched

    def record(self, layer, function, args, kwargs):
        """Runs a layer's `call` and looks at the shapes."""
        outputs = function(*args, **kwargs)
        inputs = [t for t in keras.tree.flatten((args, kwargs)) if hasattr(t, "shape")]
        for tensor in [*inputs[:1], *keras.tree.flatten(outputs)]:
            size = tensor.shape[0] if len(tensor.shape or ()) else None
            # Positions without a batch axis have a size of their own.
            if size and size % _PROBE_BATCH_SIZE == 0 and size != _PROBE_BATCH_SIZE:
                self.folded.add(layer)
        return outputs

    def before_activation(self, layer, tensor):
        """Returns the tensor: activations change no shape."""
        del layer
        return tensor


def folded_layers(model, x, layers, probing):
    """Returns the layers that are called with more than examples on their first axis.

    Args:
        model: A built Keras model.
        x: Inputs of a batch.
        layers: The layers of interest.
        probing: Function from a `FirstAxes` to a context in which it is told of layer calls.

    Returns:
        Set of layers; empty if the model cannot be called on a batch of any size.
    """
    if not _has_code_of_its_own(model):
        return frozenset()
    spec = keras.tree.map_structure(
        lambda t: keras.KerasTensor(
            (_PROBE_BATCH_SIZE, *t.shape[1:]), keras.backend.standardize_dtype(t.dtype)
        ),
        x,
    )
    key = str((spec, sorted(map(id, layers))))
    known = _found.setdefault(model, {})
    if key not in known:
        probe = FirstAxes(layers)
        try:
            with probing(probe):
                keras.src.backend.compute_output_spec(lambda x: call_in_training(model, x), spec)
        except Exception:  # A batch size that is fixed, for instance; then the step asserts it.
            probe.folded.clear()
        known[key] = probe.folded
    return known[key]


def _has_code_of_its_own(model):
    """Whether a model has more than stock layers, which keep the batch axis apart."""
    for layer in model._flatten_layers():
        if not type(layer).__module__.startswith(_KNOWN_MODULES):
            return True
        if isinstance(layer, keras.layers.Lambda):
            return True
        operations = getattr(layer, "operations", [])
        if any(not isinstance(operation, keras.layers.Layer) for operation in operations):
            return True
    return False
