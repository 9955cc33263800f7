# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The pure functions at the centre: clip weights, and the feedback of the error."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

from dice_tf.mechanism import DiceMechanism
from dice_tf.mechanism.clipping import clip_by_global_norm, clip_weights
from dice_tf.mechanism.feedback import direction_and_errors

positive = st.floats(2**-10, 2**10, width=32)


def mechanism(c1, c2, bounded=True, batch_size=4):
    return DiceMechanism(
        l2_norm_clip=c1,
        error_norm_clip=c2,
        noise_multiplier=1.0,
        expected_batch_size=batch_size,
        bound_residuals=bounded,
    )


def clip(vector, threshold):
    norm = np.linalg.norm(vector)
    return vector if norm <= threshold else vector * (threshold / norm)


@hypothesis.given(
    st.lists(
        st.lists(st.floats(-1024, 1024, width=32, allow_subnormal=False), min_size=3, max_size=3),
        min_size=1,
        max_size=5,
    ),
    positive,
    st.one_of(st.just(0.0), positive),
    st.booleans(),
)
def test_weights_are_the_clip_of_the_algorithm(gradients, c1, c2, bounded):
    gradients = np.array(gradients, np.float64)
    norms = np.linalg.norm(gradients, axis=1).astype("float32")
    head, residual = clip_weights(tf.constant(norms), mechanism(c1, c2, bounded))
    for i, g in enumerate(gradients):
        h = clip(g, c1)
        np.testing.assert_allclose(head[i] * g, h, rtol=2e-5, atol=2e-5 * c1)
        assert np.linalg.norm(float(head[i]) * g) <= c1
        if c2 == 0:
            assert residual is None
            continue
        r = clip(g - h, c2) if bounded else g - h
        atol = 1.1e-5 * c1 + 2e-6 * norms[i]
        np.testing.assert_allclose(residual[i] * g, r, rtol=1e-4, atol=atol)
        assert not bounded or np.linalg.norm(float(residual[i]) * g) <= c2


@hypothesis.given(st.lists(positive, min_size=1, max_size=5), positive, positive)
def test_no_example_moves_a_release_by_more_than_its_sensitivity(norms, c1, c2):
    """The bound that privacy rests on, float32 rounding included."""
    head, residual = clip_weights(tf.constant(norms, tf.float32), mechanism(c1, c2))
    norms, head, residual = (np.array(t, "float64") for t in (norms, head, residual))
    assert np.all(head * norms <= c1) and np.all(head * norms >= np.minimum(c1, norms) * (1 - 2e-5))
    assert np.all(residual * norms <= c2)
    assert np.all(head + residual <= 1 + 1e-7)


@pytest.mark.parametrize("bounded", [True, False])
def test_non_finite_and_zero_norms(bounded):
    norms = tf.constant([np.nan, np.inf, 0.0, 1e-38])
    head, residual = clip_weights(norms, mechanism(1.0, 1.0, bounded))
    np.testing.assert_array_equal(head, [0.0, 0.0, 1.0, 1.0])
    np.testing.assert_array_equal(residual, [0.0, 0.0, 0.0, 0.0])


def test_clip_by_global_norm_takes_all_tensors_as_one_vector():
    tensors = [tf.constant([3.0, 0.0]), tf.constant([[4.0]])]
    np.testing.assert_allclose(clip_by_global_norm(tensors, 10.0)[1], [[4.0]])
    clipped = clip_by_global_norm(tensors, 2.5)
    np.testing.assert_allclose(clipped[0], [1.5, 0.0], rtol=2e-5)
    np.testing.assert_allclose(clipped[1], [[2.0]], rtol=2e-5)
    assert np.hypot(*(float(t.numpy().ravel()[0]) for t in clipped)) <= 2.5
    np.testing.assert_array_equal(clip_by_global_norm([tf.zeros([2])], 1.0)[0], [0.0, 0.0])


def test_one_step_of_both_forms_by_hand():
    heads, residuals = [tf.constant([2.0])], [tf.constant([1.0])]
    errors = [tf.constant([3.0])]
    direction, new = direction_and_errors(heads, residuals, errors, mechanism(1.0, 1.0))
    np.testing.assert_allclose([direction[0][0], new[0][0]], [2 + 3, 1])
    direction, new = direction_and_errors(heads, residuals, errors, mechanism(1.0, 1.0, False))
    # e' = e + mean g - v with mean g = 2 + 1.
    np.testing.assert_allclose([direction[0][0], new[0][0]], [2 + 1, 3 + 3 - 3], rtol=1e-5)
    direction, new = direction_and_errors(heads, None, [], mechanism(1.0, 0.0))
    np.testing.assert_allclose(direction[0], [2.0])
    assert new == []


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
