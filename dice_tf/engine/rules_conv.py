# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Per-example gradients of convolutions, as outer products of patches and cotangents."""

import dataclasses
import math
from typing import Any

from keras import ops
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from dice_tf.engine.contributions import OuterProduct, PerExample

# Below this many channels, copying the channels of one pixel at a time is slow.
_FEW_CHANNELS = 8
# The largest kernels for which TensorFlow's gradient of a depthwise kernel is fast on one image
# of many channels; beyond, it takes up to 200 times as long (measured on CPU with AVX-512).
_FAST_DEPTHWISE = 3
# Sizes for which kernel gradients are written down row by row of the kernel.
_MOST_ENTRIES_BY_ROWS, _LEAST_POSITIONS_BY_ROWS = 2**14, 32


def supports(layer, inputs):
    """Whether `convolution` describes a layer on these inputs."""
    return supports_depthwise(layer, inputs) and not (layer.lora_enabled and layer.groups > 1)


def supports_depthwise(layer, inputs):
    """Whether `depthwise` describes a layer on these inputs."""
    shape = inputs.shape[1:]
    return (
        layer.data_format == "channels_last"
        and shape.rank == layer.rank + 1
        and shape.is_fully_defined()
    )


def convolution(layer, call):
    """Contributions of Conv1D, Conv2D and Conv3D.

    Args:
        layer: The layer.
        call: Its `LayerCall`, with cotangents before the activation.

    Returns:
        List of pairs of a variable and a contribution.
    """
    call = _late(call)
    if layer.groups > 1:
        return _with_bias(layer, call, [(layer._kernel, _grouped(layer, call))])
    if _goes_by_rows(layer, call):
        return _with_bias(layer, call, [(layer._kernel, _written_by_rows(layer, call))])
    patches, transposed = patches_of(layer, call.inputs)
    cotangents = _flat_positions(call.cotangents)
    if not layer.lora_enabled:
        product = OuterProduct(
            patches, cotangents, shape=layer._kernel.shape, transposed=transposed
        )
        return _with_bias(layer, call, [(layer._kernel, product)])
    a, b = (tf.convert_to_tensor(v._value) for v in (layer.lora_kernel_a, layer.lora_kernel_b))
    scale = layer.lora_alpha / layer.lora_rank
    patches, cotangents = tf.cast(patches, tf.float32), tf.cast(cotangents, tf.float32)
    flat_a = tf.reshape(a, [-1, layer.lora_rank])
    below = scale * tf.matmul(cotangents, b, transpose_b=True)
    above = scale * tf.matmul(
        tf.linalg.matrix_transpose(patches) if transposed else patches, flat_a
    )
    of_a = OuterProduct(patches, below, shape=a.shape, transposed=transposed)
    of_b = OuterProduct(above, cotangents, shape=b.shape)
    return _with_bias(layer, call, [(layer.lora_kernel_a, of_a), (layer.lora_kernel_b, of_b)])


def _late(call):
    """Returns a call whose inputs are read once its cotangents exist.

    TensorFlow would make patches, several times as large as what they are made of, in the forward
    pass already, and keep those of all layers until their cotangents come.
    """
    with tf.control_dependencies([call.cotangents]):
        inputs = tf.identity(call.inputs)
    return dataclasses.replace(call, args=(inputs, *call.args[1:]))


def _goes_by_rows(layer, call):
    return (
        layer.rank == 2
        and not layer.lora_enabled
        and call.inputs.shape[-1] < _FEW_CHANNELS
        and math.prod(layer._kernel.shape) <= _MOST_ENTRIES_BY_ROWS
        and math.prod(call.cotangents.shape[1:-1]) >= _LEAST_POSITIONS_BY_ROWS
        and tuple(layer.dilation_rate) == (1, 1)
        and not (_in_xla() or tf.config.list_physical_devices("GPU"))
    )


def _written_by_rows(layer, call):
    """Per-example gradients of a kernel on few channels, without a copy of every patch.

    A convolution with a constant kernel of zeros and ones copies the taps of one row, or of
    as many rows as the stride. What the other taps see are its outputs some rows further down.
    """
    channels, filters = call.inputs.shape[-1], layer.filters
    (height, width), (down, _) = layer.kernel_size, layer.strides
    geometry = (call.inputs.shape[1:-1], layer.kernel_size, layer.strides)
    (above, below), across = _paddings(*geometry, (1, 1), layer.padding)
    lines, columns = call.cotangents.shape[1:3]
    groups = -(-height // down)
    rows = lines + groups - 1
    # Rows that the last group lacks are zeros.
    below += max(rows * down - (call.inputs.shape[1] + above + below), 0)
    taps = width * channels
    edges: Any = [[0, 0], [above, below], list(across), [0, 0]]
    copied = tf.nn.conv2d(
        tf.cast(call.inputs, tf.float32),
        np.eye(down * taps, dtype=np.float32).reshape(down, width, channels, down * taps),
        strides=layer.strides,
        padding=edges,
    )
    copied = tf.reshape(copied[:, :rows], [-1, rows * columns, down * taps])
    cotangents = tf.cast(_flat_positions(call.cotangents), tf.float32)
    seen = [copied[:, columns * i : columns * (i + lines)] for i in range(groups)]
    products = [tf.matmul(part, cotangents, transpose_a=True) for part in seen]
    products = tf.concat(products, 1)[:, : height * taps]
    return PerExample(tf.reshape(products, [-1, height, width, channels, filters]))


def depthwise(layer, call):
    """Contributions of DepthwiseConv1D and DepthwiseConv2D: every channel is a group.

    Args:
        layer: The layer.
        call: Its `LayerCall`, with cotangents before the activation.

    Returns:
        List of pairs of a variable and a contribution.
    """
    call = _late(call)
    kernel = _depthwise_kernel(layer, layer.kernel.shape, call.inputs, call.cotangents)
    return _with_bias(layer, call, [(layer.kernel, kernel)])


def separable(layer, call):
    """Contributions of SeparableConv1D and SeparableConv2D.

    Args:
        layer: The layer.
        call: Its `LayerCall`, with cotangents before the activation.

    Returns:
        List of pairs of a variable and a contribution.
    """
    call = _late(call)
    deep, point = layer.depthwise_kernel, layer.pointwise_kernel
    # What the layer computes in between, in its own precision.
    between: Any = ops.depthwise_conv(
        call.inputs,
        tf.cast(tf.convert_to_tensor(deep._value), call.inputs.dtype),
        strides=layer.strides,
        padding=layer.padding,
        dilation_rate=layer.dilation_rate,
        data_format=layer.data_format,
    )
    flat = _flat_positions(call.cotangents)
    weights = tf.cast(tf.convert_to_tensor(point._value), flat.dtype)
    weights = tf.reshape(weights, point.shape[-2:])
    below = tf.reshape(tf.matmul(flat, weights, transpose_b=True), tf.shape(between))
    below = tf.ensure_shape(below, between.shape)
    kernels = [
        (deep, _depthwise_kernel(layer, deep.shape, call.inputs, below)),
        (point, OuterProduct(_flat_positions(between), flat, shape=point.shape)),
    ]
    return _with_bias(layer, call, kernels)


def _depthwise_kernel(layer, shape, inputs, cotangents):
    """The contribution to a kernel `[*kernel_size, channels, multiplier]`."""
    channels, multiplier = shape[-2:]
    if _is_depthwise_image(layer):
        return PerExample(_depthwise_gradients(layer, shape, inputs, cotangents))
    patches, cotangents = _in_groups(layer, inputs, cotangents, channels)
    order = ((channels, math.prod(layer.kernel_size), multiplier), (1, 0, 2))
    return OuterProduct(patches, cotangents, shape=shape, layout=order)


def _is_depthwise_image(layer):
    return max(layer.dilation_rate) == 1 and len(set(layer.strides)) == 1 and not _in_xla()


def _depthwise_gradients(layer, shape, inputs, cotangents):
    """Per-example gradients: of one image whose channels are those of all examples."""
    channels, multiplier = shape[-2:]
    geometry = (inputs.shape[1:-1], layer.kernel_size, layer.strides, layer.dilation_rate)
    pads, size = _paddings(*geometry, layer.padding), layer.kernel_size
    inputs, cotangents = tf.cast(inputs, tf.float32), tf.cast(cotangents, tf.float32)
    if layer.rank == 1:
        inputs, cotangents, size = inputs[:, None], cotangents[:, None], (1, *size)
        pads = [(0, 0), *pads]
    batch, stride = tf.shape(inputs)[0], layer.strides[0]
    fast = max(size) <= _FAST_DEPTHWISE or tf.config.list_physical_devices("GPU")
    # TensorFlow's gradient pads as it reads. Images no larger than the kernel take many times as
    # long that way.
    larger = all(length > taps for length, taps in zip(*geometry[:2], strict=True))
    padded = fast and larger and layer.padding == "same"
    if not padded and np.any(pads):
        inputs = tf.pad(inputs, [[0, 0], *pads, [0, 0]])

    def one_image(tensor):
        _, height, width, features = tensor.shape
        tensor = tf.transpose(tensor, [1, 2, 0, 3])
        return tf.reshape(tensor, [1, height, width, batch * features])

    if fast:
        gradients = tf.raw_ops.DepthwiseConv2dNativeBackpropFilter(
            input=one_image(inputs),
            filter_sizes=tf.stack([*size, batch * channels, multiplier]),
            out_backprop=one_image(cotangents),
            strides=[1, stride, stride, 1],
            padding="SAME" if padded else "VALID",
        )
    else:
        # The same sums as a convolution whose kernel are the cotangents, a stride apart.
        reach = [(length - 1) * stride + 1 for length in cotangents.shape[1:3]]
        seen = [a + b - 1 for a, b in zip(reach, size, strict=True)]
        gradients = tf.nn.depthwise_conv2d(
            one_image(inputs[:, : seen[0], : seen[1]]),
            tf.reshape(
                one_image(_apart(cotangents, stride)), [*reach, batch * channels, multiplier]
            ),
            strides=[1, 1, 1, 1],
            padding="VALID",
        )
    gradients = tf.reshape(gradients, [math.prod(size), batch, channels * multiplier])
    return tf.reshape(tf.transpose(gradients, [1, 0, 2]), [-1, *shape])


def _apart(images, stride):
    """Puts zeros between the pixels of `[batch, height, width, channels]`."""
    if stride == 1:
        return images
    _, height, width, channels = images.shape
    zeros: Any = [[0, 0], [0, 0], [0, stride - 1], [0, 0], [0, stride - 1], [0, 0]]
    images = tf.pad(tf.reshape(images, [-1, height, 1, width, 1, channels]), zeros)
    images = tf.reshape(images, [-1, height * stride, width * stride, channels])
    return images[:, : 1 + (height - 1) * stride, : 1 + (width - 1) * stride]


def _in_xla():
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def _grouped(layer, call):
    channels, shape = call.inputs.shape[-1], layer._kernel.shape
    if layer.groups == channels and layer.rank < 3 and _is_depthwise_image(layer):
        # A depthwise convolution, whose kernel has its last two axes in one.
        deep = (*layer.kernel_size, channels, layer.filters // channels)
        gradients = _depthwise_gradients(layer, deep, call.inputs, call.cotangents)
        return PerExample(tf.reshape(gradients, [-1, *shape]))
    patches, cotangents = _in_groups(layer, call.inputs, call.cotangents, layer.groups)
    inputs, outputs = patches.shape[-1], layer.filters // layer.groups
    return OuterProduct(
        patches,
        cotangents,
        shape=shape,
        layout=((layer.groups, inputs, outputs), (1, 0, 2)),
    )


def _in_groups(layer, inputs, cotangents, groups):
    """Returns patches and cotangents as `[batch, groups, positions, features]`."""
    channels = inputs.shape[-1]
    size = math.prod(layer.kernel_size)
    patches, transposed = patches_of(layer, inputs)
    if transposed:
        patches = tf.linalg.matrix_transpose(patches)
    patches = tf.reshape(patches, [-1, patches.shape[1], size, groups, channels // groups])
    patches = tf.transpose(patches, [0, 3, 1, 2, 4])
    patches = tf.reshape(patches, [-1, groups, patches.shape[2], size * (channels // groups)])
    cotangents = _flat_positions(cotangents)
    features = cotangents.shape[-1] // groups
    cotangents = tf.reshape(cotangents, [-1, cotangents.shape[1], groups, features])
    return patches, tf.transpose(cotangents, [0, 2, 1, 3])


def _with_bias(layer, call, contributions):
    if layer.bias is not None:
        gradients = tf.reduce_sum(tf.cast(_flat_positions(call.cotangents), tf.float32), 1)
        contributions.append((layer.bias, PerExample(gradients)))
    return contributions


def _flat_positions(tensor):
    return tf.reshape(tensor, [-1, math.prod(tensor.shape[1:-1]), tensor.shape[-1]])


def patches_of(layer, inputs):
    """Copies out what every output position of a convolution sees.

    Gathers with a constant index are several times faster on CPU than
    `tf.image.extract_patches` or strided slices, and serve any number of dimensions. With XLA
    it is the other way round.

    Args:
        layer: A convolution with `kernel_size`, `strides`, `dilation_rate`, `padding`.
        inputs: `[batch, *spatial, channels]`.

    Returns:
        Patches, `[batch, positions, taps * channels]`, and `False`; or
        `[batch, taps * channels, positions]` and `True`.
    """
    channels = inputs.shape[-1]
    geometry = (inputs.shape[1:-1], layer.kernel_size, layer.strides, layer.dilation_rate)
    pads, index = _tap_positions(*geometry, layer.padding)
    positions, taps = index.shape
    if np.any(pads):
        inputs = tf.pad(inputs, [[0, 0], *pads, [0, 0]])
    spatial: Any = inputs.shape[1:-1]
    points = math.prod(spatial)
    if _in_xla():
        return _by_slices(layer, inputs), False
    if taps == 1 and positions == points:
        return tf.reshape(inputs, [-1, points, channels]), False
    if channels < _FEW_CHANNELS:
        return _patches_of_few_channels(inputs, geometry, layer.padding), True
    patches = tf.gather(tf.reshape(inputs, [-1, points, channels]), index, axis=1)
    return tf.reshape(patches, [-1, positions, taps * channels]), False


def _by_slices(layer, padded):
    """The same, `[batch, positions, taps * channels]`, copying the taps of one axis at a time."""
    geometry = zip(layer.kernel_size, layer.strides, layer.dilation_rate, strict=True)
    for axis, (taps, stride, step) in reversed([*enumerate(geometry, 1)]):
        outputs = (padded.shape[axis] - (taps - 1) * step - 1) // stride + 1
        span, before = (outputs - 1) * stride + 1, [slice(None)] * axis
        cuts = [slice(tap * step, tap * step + span, stride) for tap in range(taps)]
        padded = tf.concat([padded[(*before, cut)] for cut in cuts], -1)
    return _flat_positions(padded)


def _patches_of_few_channels(padded, geometry, padding):
    """The same, `[batch, taps * channels, positions]`, without copying single pixels.

    Taps along the last axis are copied first; what remains are copies of whole rows of
    output positions.
    """
    channels, size = padded.shape[-1], padded.shape[-2]
    rows = math.prod(padded.shape[1:-2])
    _, across = _tap_positions(*(part[-1:] for part in geometry), padding=padding)
    _, along = _tap_positions(*(part[:-1] for part in geometry), padding=padding)
    (columns, taps), (lines, line_taps) = across.shape, along.shape
    channel = np.arange(channels, dtype=np.int32)[None, :, None]
    index = across.T[:, None, :] * channels + channel
    patches = tf.gather(tf.reshape(padded, [-1, rows, size * channels]), index.reshape(-1), axis=2)
    features = np.arange(taps * channels, dtype=np.int32)[None, :, None]
    index = along.T[:, None, :] * (taps * channels) + features
    patches = tf.gather(
        tf.reshape(patches, [-1, rows * taps * channels, columns]), index.reshape(-1), axis=1
    )
    return tf.reshape(patches, [-1, line_taps * taps * channels, lines * columns])


def _tap_positions(spatial, kernel_size, strides, dilation, padding):
    """Returns padding per axis, and where in the padded input each tap of each output lies.

    Args:
        spatial: Sizes of the spatial axes.
        kernel_size: Taps per axis.
        strides: Stride per axis.
        dilation: Distance between taps per axis.
        padding: `"valid"`, `"same"` (TensorFlow's, more at the end) or `"causal"`.

    Returns:
        List of pairs of ints, and int32 `[positions, taps]` into the flattened axes.
    """
    axes = len(spatial)
    index, stride_of_axis = np.zeros([1] * (2 * axes), np.int32), 1
    pads = _paddings(spatial, kernel_size, strides, dilation, padding)
    sizes = [size + sum(pad) for size, pad in zip(spatial, pads, strict=True)]
    reach = [(k - 1) * d + 1 for k, d in zip(kernel_size, dilation, strict=True)]
    for axis in reversed(range(axes)):
        outputs = (sizes[axis] - reach[axis]) // strides[axis] + 1
        starts = np.arange(outputs, dtype=np.int32) * strides[axis]
        taps = np.arange(kernel_size[axis], dtype=np.int32) * dilation[axis]
        shape = [1] * (2 * axes)
        shape[axis], shape[axes + axis] = outputs, kernel_size[axis]
        where = starts[:, None] + taps[None, :]
        index = index + where.reshape(shape) * stride_of_axis
        stride_of_axis *= sizes[axis]
    positions = math.prod(index.shape[:axes])
    return pads, np.ascontiguousarray(index.reshape(positions, -1))


def _paddings(spatial, kernel_size, strides, dilation, padding):
    """Returns padding per axis, pairs of ints, for the arguments of `_tap_positions`."""
    pads = []
    for size, taps, stride, step in zip(spatial, kernel_size, strides, dilation, strict=True):
        extent = (taps - 1) * step + 1
        if padding == "same":
            total = max((-(-size // stride) - 1) * stride + extent - size, 0)
            pads.append((total // 2, total - total // 2))
        else:
            pads.append((extent - 1, 0) if padding == "causal" else (0, 0))
    return pads
