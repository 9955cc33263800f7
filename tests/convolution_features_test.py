# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Features by random convolutions against a loop over cells, and that images do not mix."""

import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

import convolution_features

PATCH, CELL = convolution_features.PATCH, convolution_features.CELL
FILTERS = convolution_features.FILTERS


@pytest.fixture(scope="module", name="images")
def images_with_a_flat_one():
    random = np.random.default_rng(0)
    images = np.repeat(np.repeat(random.integers(0, 256, (5, 6, 4)), 2, 1), 2, 2)
    images = images.astype(np.uint8)
    # No pixel beyond the edge is 0 unless the image is: zeros surround it.
    images[3] = 0
    return images


def by_a_loop(image):
    """The formula of the module, in float64."""
    before = PATCH // 2
    padded = np.pad(image.astype(float), (before, PATCH - 1 - before))
    weights = convolution_features.filters().astype(float)
    height, width = image.shape
    cells = np.zeros((height // CELL, width // CELL, 2 * FILTERS))
    for row in range(height):
        for column in range(width):
            patch = padded[row : row + PATCH, column : column + PATCH].ravel()
            answer = weights @ patch / (PATCH * np.sqrt(patch.var() + convolution_features.FLAT))
            both = np.concatenate([answer, -answer])
            above = np.maximum(both - convolution_features.THRESHOLD, 0)
            cells[row // CELL, column // CELL] += above / CELL**2
    roots = np.sqrt(cells)
    roots -= roots.mean((0, 1))
    return (roots / np.linalg.norm(roots)).ravel()


def test_against_a_loop_over_pixels(images):
    found = convolution_features.features(images)
    assert found.shape == (5, 3 * 2 * 2 * FILTERS) and found.dtype == np.float32
    for i in (0, 4):
        np.testing.assert_allclose(found[i], by_a_loop(images[i]), atol=1e-4)
        assert np.linalg.norm(found[i]) == pytest.approx(1, abs=1e-5)
    # An image without contrasts has no features, and no NaN.
    assert not found[3].any()


def test_an_image_has_the_same_features_whatever_the_others_are(images):
    together = convolution_features.features(images)
    for i in (0, 3):
        alone = convolution_features.features(images[i : i + 1])
        np.testing.assert_allclose(alone[0], together[i], atol=1e-6)


def test_filters_see_contrasts_only_and_a_seed_fixes_them():
    filters = convolution_features.filters()
    assert filters.shape == (FILTERS, PATCH**2)
    np.testing.assert_allclose(filters.sum(1), 0, atol=1e-5)
    np.testing.assert_array_equal(filters, convolution_features.filters())
    assert not np.allclose(filters, convolution_features.filters(seed=1))


def test_filters_whiten_patches_of_noise_like_photographs():
    # As independent of `filters` as can be: noise by summing up white noise along both axes
    # would have another spectrum, so a spectrum is set on the half plane of a real transform.
    random = np.random.default_rng(5)
    size = 64
    rows, columns = np.fft.fftfreq(size)[:, np.newaxis], np.fft.rfftfreq(size)
    power = rows**2 + columns**2
    power[0, 0] = np.inf
    patches = []
    for _ in range(400):
        image = np.fft.irfft2(np.fft.rfft2(random.standard_normal((size, size))) / power**0.5)
        patches += [image[i : i + PATCH, j : j + PATCH].ravel() for i in (0, 20) for j in (0, 20)]
    patches = np.array(patches)
    patches -= patches.mean(1, keepdims=True)
    patches /= patches.std(1, keepdims=True)
    power_of = lambda filters: np.var(patches @ filters.T, 0)
    whitened, plain = convolution_features.filters(), random.permutation(patches)[:FILTERS]
    plain /= np.linalg.norm(plain, axis=1, keepdims=True)
    # Every filter gets about as much out of such patches; patches as filters do not.
    spread = lambda powers: powers.max() / powers.min()
    assert spread(power_of(whitened)) < 0.5 * spread(power_of(plain))
    assert 0.3 < power_of(whitened).min() and power_of(whitened).max() < 1.5


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
