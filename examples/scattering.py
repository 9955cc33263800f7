# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
r"""Scattering features of images: fixed wavelets, nothing learnt, so no privacy is spent.

Per image, with wavelets \(\psi_\lambda\) of several scales and orientations and a low-pass
filter \(\phi\):

\[x * \phi, \qquad |x * \psi_\lambda| * \phi, \qquad
  ||x * \psi_\lambda| * \psi_{\lambda'}| * \phi \ \text{ for coarser } \lambda',\]

sampled at every \(2^J\)-th pixel.

Source: Bruna and Mallat, "Invariant Scattering Convolution Networks", IEEE TPAMI 35
(2013). Their use with private linear models: Tramer and Boneh, ICLR 2021.
"""

import math

import numpy as np
from scipy import fft

_SCALES, _ANGLES = 2, 8
STRIDE = 2**_SCALES
# Reflected before filtering, because the Fourier transform joins opposite edges.
_BEFORE, _AFTER = 8, 4


def features(images, progress=lambda done, total: None, chunk=500):
    """Computes scattering features.

    Args:
        images: Float or uint8 `[images, height, width]`, sizes divisible by `STRIDE`.
        progress: Function that is called with the numbers of images done and in all.
        chunk: Int, images computed at a time.

    Returns:
        Float32 `[images, channels, height / STRIDE, width / STRIDE]`, where channels are 1
        of order 0, 16 of order 1 and 64 of order 2.
    """
    sizes = [size + _BEFORE + _AFTER for size in images.shape[1:]]
    wavelets = filters(*sizes)[1]
    averages = [_averaging_matrix(size) for size in sizes]
    parts = []
    for start in range(0, len(images), chunk):
        part = images[start : start + chunk].astype(np.float32)
        parts.append(_scatter(part, wavelets, *averages))
        progress(min(start + chunk, len(images)), len(images))
    return np.concatenate(parts)


def _scatter(images, wavelets, average_rows, average_columns):
    around = ((0, 0), (_BEFORE, _AFTER), (_BEFORE, _AFTER))
    images = np.pad(images, around, mode="reflect")
    averaged = lambda images: average_rows @ images @ average_columns.T
    spectrum_of = lambda images: fft.fft2(images, workers=-1)
    modulus = lambda spectrum, wavelet: np.abs(fft.ifft2(spectrum * wavelet, workers=-1))

    channels, spectrum = [averaged(images)], spectrum_of(images)
    for scale, of_scale in enumerate(wavelets):
        coarser = [wavelet for others in wavelets[scale + 1 :] for wavelet in others]
        for wavelet in of_scale:
            first = modulus(spectrum, wavelet)
            channels.append(averaged(first))
            if coarser:
                first = spectrum_of(first)
                channels += [averaged(modulus(first, second)) for second in coarser]
    return np.stack(channels, 1).astype(np.float32)


def _averaging_matrix(size):
    """The low-pass filter and the sampling along one axis, which are cheap as a product."""
    response = fft.ifft(filters(size, 1)[0][:, 0]).real
    kept = range(_BEFORE, size - _AFTER, STRIDE)
    return np.stack([np.roll(response, position) for position in kept]).astype(np.float32)


def filters(height, width):
    """Returns the filters in the Fourier domain.

    Args:
        height: Int.
        width: Int.

    Returns:
        Float32 `[height, width]`, the Gaussian low-pass filter, and a list over scales of
        lists over angles of the same, Morlet wavelets.
    """
    low_pass = _gabor(height, width, 0.8 * 2 ** (_SCALES - 1), 0.0, 0.0, 1.0)
    wavelets = []
    for scale in range(_SCALES):
        shape = 0.8 * 2**scale, 3 * math.pi / 4 / 2**scale, 4 / _ANGLES
        wavelets.append(
            [_morlet(height, width, *shape, math.pi * i / _ANGLES) for i in range(_ANGLES)]
        )
    return low_pass, wavelets


def _morlet(height, width, sigma, frequency, slant, angle):
    wave = _gabor(height, width, sigma, frequency, angle, slant)
    envelope = _gabor(height, width, sigma, 0.0, angle, slant)
    # Without a mean: a constant image has no first order.
    return wave - envelope * (wave[0, 0] / envelope[0, 0])


def _gabor(height, width, sigma, frequency, angle, slant):
    """Transform of a Gaussian, stretched by 1/slant across `angle`, times a wave along it."""
    # The transform of samples is periodic: terms beyond the first neighbours are below 1e-7.
    rows, columns = (
        2 * math.pi * (np.arange(size) / size + np.arange(-2, 2)[:, np.newaxis])
        for size in (height, width)
    )
    total = np.zeros((height, width))
    for row in rows:
        for column in columns:
            along = math.cos(angle) * column[np.newaxis] + math.sin(angle) * row[:, np.newaxis]
            across = math.cos(angle) * row[:, np.newaxis] - math.sin(angle) * column[np.newaxis]
            total += np.exp(-(sigma**2) * ((along - frequency) ** 2 + (across / slant) ** 2) / 2)
    return total.astype(np.float32)
