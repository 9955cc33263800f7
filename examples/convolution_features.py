# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""Features of images by random convolutions: nothing in them is learnt, so no privacy is spent.

Every patch \(p\) of an image is compared with filters \(w_k\), and what is above a threshold
\(\tau\) is averaged over square cells of the image:

\[y_k = \frac{\langle w_k, p\rangle}{\sqrt{\lvert p\rvert\,(\mathrm{var}(p) + v)}}, \qquad
  a_{k\pm} = \sqrt{\operatorname{mean}_{\text{cell}} \max(\pm y_k - \tau, 0)}.\]

The root holds down what a few strong patches add. From each channel its mean over the cells of
the image is taken off: what all images share would take most of the norm that clipping allows.

The filters are random patches, whitened, of noise with the spectrum \(1/f^2\) of photographs.

Source: Coates, Lee and Ng, "An Analysis of Single-Layer Networks in Unsupervised Feature
Learning", AISTATS 2011: whitened patches as filters, contrasts made alike, two signs, pooling.
Their patches come from the training images, which would have to be paid for.
"""

import numpy as np
import tensorflow as tf

PATCH, CELL = 5, 4
FILTERS = 48
THRESHOLD = 0.25
# Variance of grey levels from 0 to 255, below which a patch counts as flat.
FLAT = 10.0
# Added to the variances of patches of variance 1, so that whitening does not blow up the small.
_WHITENING = 0.1
# Images at a time.
_CHUNK = 500


def features(images):
    """Computes features of norm 1.

    Args:
        images: Grey levels from 0 to 255, float or uint8 `[images, height, width]`, sizes
            divisible by `CELL`.

    Returns:
        Float32 `[images, height / CELL * width / CELL * 2 * FILTERS]`. An image without
        contrasts has zeros.
    """
    weights = filters().T.reshape(PATCH, PATCH, 1, FILTERS)
    cells = [size // CELL for size in images.shape[1:]]
    result = np.empty((len(images), cells[0] * cells[1] * 2 * FILTERS), np.float32)
    compiled = tf.function(_features)
    for start in range(0, len(images), _CHUNK):
        part = images[start : start + _CHUNK, ..., np.newaxis].astype(np.float32)
        result[start : start + _CHUNK] = compiled(part, weights)
    return result


def _features(images, weights):
    """Features of float32 images `[images, height, width, 1]` by filters of mean 0."""
    before = PATCH // 2
    images = tf.pad(images, [(0, 0), *[(before, PATCH - 1 - before)] * 2, (0, 0)])
    convolve = lambda images, weights: tf.nn.conv2d(images, weights, 1, "VALID")
    mean = tf.fill((PATCH, PATCH, 1, 1), 1 / PATCH**2)
    variances = tf.nn.relu(convolve(images**2, mean) - convolve(images, mean) ** 2)
    answers = convolve(images, weights) / (PATCH * tf.sqrt(variances + FLAT))
    both_signs = tf.concat([answers, -answers], -1)
    averages = tf.nn.avg_pool2d(tf.nn.relu(both_signs - THRESHOLD), CELL, CELL, "VALID")
    roots = tf.sqrt(averages)
    centred = roots - tf.reduce_mean(roots, (1, 2), keepdims=True)
    vectors = tf.reshape(centred, (len(images), -1))
    return tf.math.divide_no_nan(vectors, tf.norm(vectors, axis=1, keepdims=True))


def filters(seed=0):
    """Returns the filters, which a seed fixes.

    Args:
        seed: Int.

    Returns:
        Float32 `[FILTERS, PATCH * PATCH]`, each of mean 0.
    """
    random = np.random.default_rng(seed)
    size, count, of_each = 40, 2000, 20
    frequencies = np.fft.fftfreq(size)
    distances = np.hypot(frequencies[:, np.newaxis], frequencies)
    distances[0, 0] = 1.0
    noise = np.fft.fft2(random.standard_normal((count, size, size)))
    images = np.fft.ifft2(noise / distances).real
    images /= images.std((1, 2), keepdims=True)
    rows, columns = random.integers(0, size - PATCH + 1, (2, count * of_each))
    windows = np.lib.stride_tricks.sliding_window_view(images, (PATCH, PATCH), (1, 2))
    patches = windows[np.arange(count * of_each) // of_each, rows, columns]
    patches = patches.reshape(-1, PATCH * PATCH)
    patches -= patches.mean(1, keepdims=True)
    patches /= np.sqrt(patches.var(1, keepdims=True) + 0.01)
    variances, directions = np.linalg.eigh(patches.T @ patches / len(patches))
    whitening = (directions / np.sqrt(variances + _WHITENING)) @ directions.T
    drawn = patches[random.permutation(len(patches))[:FILTERS]] @ whitening
    drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
    # Patches of images are to be whitened, too, before they are compared: the matrix once more.
    result = drawn @ whitening
    return (result - result.mean(1, keepdims=True)).astype(np.float32)
