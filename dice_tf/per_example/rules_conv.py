# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Per-example gradients of convolutions, as outer products of patches and cotangents."""

import math

import numpy as np
import tensorflow as tf

from dice_tf.per_example.contributions import OuterProduct, PerExample

# Below this many channels, copying the channels of one pixel at a time is slow.
_FEW_CHANNELS = 8


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
    if layer.groups > 1:
        return _with_bias(layer, call, [(layer._kernel, _grouped(layer, call))])
    patches, transposed = _patches(layer, call.inputs)
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


def depthwise(layer, call):
    """Contributions of DepthwiseConv1D and DepthwiseConv2D: every channel is a group.

    Args:
        layer: The layer.
        call: Its `LayerCall`, with cotangents before the activation.

    Returns:
        List of pairs of a variable and a contribution.
    """
    channels = call.inputs.shape[-1]
    patches, cotangents = _in_groups(layer, call, channels)
    order = ((channels, math.prod(layer.kernel_size), layer.depth_multiplier), (1, 0, 2))
    product = OuterProduct(patches, cotangents, shape=layer.kernel.shape, layout=order)
    return _with_bias(layer, call, [(layer.kernel, product)])


def _grouped(layer, call):
    patches, cotangents = _in_groups(layer, call, layer.groups)
    inputs, outputs = patches.shape[-1], layer.filters // layer.groups
    return OuterProduct(
        patches,
        cotangents,
        shape=layer._kernel.shape,
        layout=((layer.groups, inputs, outputs), (1, 0, 2)),
    )


def _in_groups(layer, call, groups):
    """Returns patches and cotangents as `[batch, groups, positions, features]`."""
    channels = call.inputs.shape[-1]
    size = math.prod(layer.kernel_size)
    patches, transposed = _patches(layer, call.inputs)
    if transposed:
        patches = tf.linalg.matrix_transpose(patches)
    patches = tf.reshape(patches, [-1, patches.shape[1], size, groups, channels // groups])
    patches = tf.transpose(patches, [0, 3, 1, 2, 4])
    patches = tf.reshape(patches, [-1, groups, patches.shape[2], size * (channels // groups)])
    cotangents = _flat_positions(call.cotangents)
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


def _patches(layer, inputs):
    """Copies out what every output position of a convolution sees.

    Gathers with a constant index are several times faster on CPU than
    `tf.image.extract_patches` or strided slices, and serve any number of dimensions.

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
    points = math.prod(inputs.shape[1:-1])
    if taps == 1 and positions == points:
        return tf.reshape(inputs, [-1, points, channels]), False
    if channels < _FEW_CHANNELS:
        return _patches_of_few_channels(inputs, geometry, layer.padding), True
    patches = tf.gather(tf.reshape(inputs, [-1, points, channels]), index, axis=1)
    return tf.reshape(patches, [-1, positions, taps * channels]), False


def _patches_of_few_channels(padded, geometry, padding):
    """The same, `[batch, taps * channels, positions]`, without copying single pixels.

    Taps along the last axis are copied first; what remains are copies of whole rows of
    output positions.
    """
    channels, size = padded.shape[-1], padded.shape[-2]
    rows = math.prod(padded.shape[1:-2])
    _, across = _tap_positions(*(part[-1:] for part in geometry), padding)
    _, along = _tap_positions(*(part[:-1] for part in geometry), padding)
    (columns, taps), (lines, line_taps) = across.shape, along.shape
    channel = np.arange(channels, dtype=np.int32)[None, :, None]
    index = across.T[:, None, :] * channels + channel
    patches = tf.gather(
        tf.reshape(padded, [-1, rows, size * channels]), index.reshape(-1), axis=2
    )
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
    pads, index, stride_of_axis = [], np.zeros([1] * (2 * axes), np.int32), 1
    sizes, reach = [], [(k - 1) * d + 1 for k, d in zip(kernel_size, dilation, strict=True)]
    for size, extent, stride in zip(spatial, reach, strides, strict=True):
        if padding == "same":
            total = max((-(-size // stride) - 1) * stride + extent - size, 0)
            pads.append((total // 2, total - total // 2))
        else:
            pads.append((extent - 1, 0) if padding == "causal" else (0, 0))
        sizes.append(size + sum(pads[-1]))
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
