# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`fix_model`: a copy of a model with GroupNormalization in place of BatchNormalization.

The graph of the model is called anew with copies of its layers, however deeply its models
are nested. A layer of a class of its own makes its normalisation itself, so its copy is held
by a layer that replaces them, now and whenever it is loaded from a file.
"""

import contextlib
import inspect
import textwrap

import keras

from dice_tf.checks.model_checks import check_model, is_graph, mixes_batch_statistics
from dice_tf.engine.overrides import shallow_copy
from dice_tf.errors import ModelError

# The two choices that Wu & He (2018) found best. A group of one channel is of no use: without
# positions to average over it is a constant, and with them their mean is.
_MOST_GROUPS, _CHANNELS_PER_GROUP = 32, 16


def fix_model(model: keras.Model) -> keras.Model:
    """Returns a copy in which GroupNormalization takes the place of BatchNormalization.

    GroupNormalization normalises each example on its own: images in groups of 16 channels
    or more, vectors in one group. The other layers keep their configuration, weights, seeds
    and what is frozen; the replaced ones start anew, because batch statistics have no meaning
    for them. A frozen BatchNormalization mixes nothing and stays.

    Nested models and layers called several times are handled as they are. A model of a class
    of its own becomes `keras.Model`, unless its constructor takes inputs and outputs. A layer
    of a class of its own that holds BatchNormalization is called by a layer of this package:
    to load the saved model, `import dice_tf` first.

    Args:
        model: A Sequential or Functional Keras model.

    Returns:
        A new, uncompiled model that passes `check_model` if BatchNormalization was the
        only problem.

    Raises:
        ModelError: If the model has another problem, or cannot be copied.

    Example:

    >>> model = keras.Sequential([
    ...     keras.Input((8, 8, 4)), keras.layers.Conv2D(6, 3), keras.layers.BatchNormalization()])
    >>> [type(layer).__name__ for layer in fix_model(model).layers]
    ['Conv2D', 'GroupNormalization']

    Source: Wu and He, "Group normalization", ECCV 2018.
    """
    if not is_graph(model):
        _refuse(model, "it is not Sequential or Functional")
    if not model.built:
        raise ModelError(
            f"Model '{model.name}' is not built, so fix_model does not know how many channels its "
            "layers have. Give it a `keras.Input`, or call it on a batch once."
        )
    copies = {}
    fixed = _copied(model, copies)
    # A container after what it contains, because freezing one freezes its contents.
    for old, new in reversed(copies.values()):
        with _errors_of(old):
            _copy_state(old, new)
    return check_model(fixed)


@keras.saving.register_keras_serializable("dice_tf")
class GroupNormalized(keras.layers.Layer):
    """Calls a layer in which GroupNormalization takes the place of BatchNormalization.

    Args:
        layer: A Keras layer that was not called yet. It is changed.
        groups: For each BatchNormalization in it the number of groups of its replacement,
            or `None` to keep it.
        **kwargs: Arguments of `keras.layers.Layer`.
    """

    def __init__(self, layer, groups, **kwargs):
        super().__init__(autocast=False, **kwargs)
        # Later it could not be loaded: its constructor makes BatchNormalization.
        self._layer_config = keras.saving.serialize_keras_object(layer)
        self.layer = layer
        self.groups = list(groups)
        self._replaced = False
        self.supports_masking = layer.supports_masking

    def build(self, input_shape=None):
        del input_shape  # what the layer holds may be made by its first call, so replaced then

    def call(self, *args, **kwargs):
        if not self._replaced:
            self.layer(*args, **kwargs)
            self._replace()
        return self.layer(*args, **kwargs)

    def _replace(self):
        norms = _batch_normalizations(self.layer)
        if len(norms) != len(self.groups):
            _refuse(self.layer, "its copy holds another number of them")
        for norm, groups in zip(norms, self.groups, strict=True):
            if groups is not None:
                _become(norm, _group_normalization(norm, groups))
        self._replaced = True

    def compute_mask(self, inputs, previous_mask):
        return self.layer.compute_mask(inputs, previous_mask)

    def get_config(self):
        return {**super().get_config(), "layer": self._layer_config, "groups": self.groups}

    @classmethod
    def from_config(cls, config):
        layer = keras.saving.deserialize_keras_object(config["layer"])
        return super().from_config({**config, "layer": layer})


def _copied(layer, copies):
    """Returns the copy of a layer, the same one whenever the layer is met."""
    if id(layer) not in copies:
        # Its contents enter `copies` before it does.
        new = _copy_of(layer, copies)
        copies[id(layer)] = layer, new
    return copies[id(layer)][1]


def _copy_of(layer, copies):
    if mixes_batch_statistics(layer):
        return _group_normalization(layer, _groups(layer))
    if is_graph(layer):
        return _called_anew(layer, copies)
    new = _from_config(layer)
    if not isinstance(layer, keras.layers.Layer) or not any(
        map(mixes_batch_statistics, layer._flatten_layers())
    ):
        return new
    groups = [
        _groups(norm) if mixes_batch_statistics(norm) else None
        for norm in _batch_normalizations(layer)
    ]
    return GroupNormalized(new, groups, name=layer.name, dtype=layer.dtype_policy)


def _called_anew(model, copies):
    copy_of = lambda layer: _copied(layer, copies)
    with _errors_of(model):
        if isinstance(model, keras.Sequential):
            layers = [_input_like(model.inputs[0]), *map(copy_of, model.layers)]
            return keras.Sequential(layers, name=model.name)
        # Keras would compile the copy of a compiled model, and with it copy the optimizer.
        uncompiled = shallow_copy(model)
        vars(uncompiled)["compiled"] = False
        return keras.models.clone_model(
            uncompiled,
            input_tensors=keras.tree.map_structure(_input_like, model.input),
            clone_function=copy_of,
            call_function=_call,
        )


def _call(layer, *args, **kwargs):
    if isinstance(layer, keras.layers.GroupNormalization):
        # BatchNormalization takes a mask, GroupNormalization passes it on only.
        kwargs.pop("mask", None)
    with _errors_of(layer):
        return layer(*args, **kwargs)


def _from_config(layer):
    with _errors_of(layer), _classes_of(layer):
        if isinstance(layer, keras.layers.Lambda):
            # Its function comes from this process, not from a file.
            return layer.from_config(layer.get_config(), safe_mode=False)
        return layer.from_config(layer.get_config())


@contextlib.contextmanager
def _errors_of(layer):
    """Says of which layer it is that Keras cannot copy it."""
    try:
        yield
    except ModelError:
        raise
    except (TypeError, ValueError, NotImplementedError, AttributeError) as error:
        # Its first line, for Keras often adds a whole configuration.
        said = textwrap.shorten(str(error).split("\n", 1)[0].rstrip("."), 100, placeholder=" …")
        _refuse(layer, f"Keras says: {said}", error)


def _classes_of(layer):
    """Scope in which Keras finds the classes and functions of a layer without registration."""
    parts = layer._flatten_layers() if isinstance(layer, keras.layers.Layer) else [layer]
    found = {}
    for part in parts:
        found[type(part).__name__] = type(part)
        found.update({f.__name__: f for f in vars(part).values() if inspect.isfunction(f)})
    return keras.saving.custom_object_scope(found)


def _input_like(tensor):
    layer = tensor._keras_history.operation
    return keras.Input(
        batch_shape=tensor.shape, dtype=tensor.dtype, sparse=tensor.sparse, name=layer.name,
        optional=getattr(layer, "optional", False),
    )  # fmt: skip


def _batch_normalizations(layer):
    return [
        part for part in layer._flatten_layers()
        if isinstance(part, keras.layers.BatchNormalization)
    ]  # fmt: skip


def _group_normalization(layer, groups):
    if layer.built and layer.axis % layer.input_spec.ndim == 0:
        _refuse(layer, f"its axis={layer.axis} is that of the batch")
    known = keras.layers.GroupNormalization().get_config()
    shared = {name: value for name, value in layer.get_config().items() if name in known}
    return keras.layers.GroupNormalization.from_config({**shared, "groups": groups})


def _groups(layer):
    if not layer.built:  # it is never called
        return 1
    channels = layer.moving_mean.shape[0]
    # Units of a dense layer have no order that would make some of them a group.
    most = 1 if layer.input_spec.ndim == 2 else min(_MOST_GROUPS, channels // _CHANNELS_PER_GROUP)
    return max((g for g in range(1, most + 1) if channels % g == 0), default=1)


def _become(layer, other):
    """Makes a layer the other one for all who refer to it, in attributes, lists or graphs."""
    if layer.built:
        other.build(layer.get_build_config()["input_shape"])
    for node in layer._inbound_nodes:
        node.arguments.kwargs.pop("mask", None)
    nodes = {name: vars(layer)[name] for name in ("_inbound_nodes", "_outbound_nodes")}
    vars(other).update(nodes)
    object.__setattr__(layer, "__dict__", vars(other))
    object.__setattr__(layer, "__class__", type(other))


def _copy_state(old, new):
    """Copies weights, seeds and what is frozen, but not of what was replaced."""
    if not isinstance(old, keras.layers.Layer):
        return
    if is_graph(old):
        _freeze_like(old, new)  # its layers are copied one by one
        return
    new = new.layer if isinstance(new, GroupNormalized) else new
    parts = list(zip(old._flatten_layers(), new._flatten_layers(), strict=True))
    for old_part, new_part in parts:
        _freeze_like(old_part, new_part)
    replaced = [pair for pair in parts if mixes_batch_statistics(pair[0])]
    kept = []
    for layer, dropped in ((old, [o for o, _ in replaced]), (new, [n for _, n in replaced])):
        ids = {id(v) for part in dropped for v in part.variables}
        kept.append([v for v in layer.variables if id(v) not in ids])
    for old_variable, new_variable in zip(*kept, strict=True):
        new_variable.assign(old_variable)
        if new_variable.trainable != old_variable.trainable:
            new_variable.trainable = old_variable.trainable
    for old_part, new_part in parts:
        _copy_what_was_adapted(old_part, new_part)


def _copy_what_was_adapted(old, new):
    """Copies what `adapt` computed and keeps outside of variables."""
    if isinstance(new, keras.layers.Normalization):
        new.finalize_state()
    if isinstance(new, (keras.layers.StringLookup, keras.layers.IntegerLookup)):
        # Part of its configuration if it was not adapted.
        if old.input_vocabulary is None:
            inverse_frequencies = old.idf_weights_const if old.output_mode == "tf_idf" else None
            new.set_vocabulary(old.get_vocabulary(), inverse_frequencies)


def _freeze_like(old, new):
    if new.trainable != old.trainable:
        new.trainable = old.trainable


def _refuse(layer, reason, error=None):
    raise ModelError(
        f"Layer '{getattr(layer, 'path', None) or layer.name}' ({type(layer).__name__}) cannot be "
        f"copied with GroupNormalization in place of BatchNormalization: {reason}. In the code "
        "that makes it, write `keras.layers.GroupNormalization(groups=1)`, or freeze a pretrained "
        "BatchNormalization by `trainable=False`."
    ) from error
