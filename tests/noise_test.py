# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The noise of real training steps: its law, its scale, its independence."""

import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from dice_tf.errors import MechanismError
from dice_tf.mechanism import noise
from dice_tf.training.optimizers import DiceSGDOptimizer

L2_NORM_CLIP, NOISE_MULTIPLIER, BATCH = 0.5, 1.7, 20
STDDEV = NOISE_MULTIPLIER * L2_NORM_CLIP / BATCH
SIZE = 40


def noise_of_training(steps=2, jit_compile=False, seed=None, learning_rate=0.25, **arguments):
    """Trains a model whose gradient is 0 and returns (old - new) / learning rate per step."""
    model = keras.Sequential([keras.Input((SIZE,)), keras.layers.Dense(SIZE)])
    model.compile(
        DiceSGDOptimizer(
            learning_rate=learning_rate,
            l2_norm_clip=L2_NORM_CLIP,
            noise_multiplier=NOISE_MULTIPLIER,
            expected_batch_size=BATCH,
            noise_seed=seed,
            **arguments,
        ),
        loss="mse",
        jit_compile=jit_compile,
    )
    model.layers[0].kernel.assign(tf.zeros([SIZE, SIZE]))
    x = np.zeros((BATCH, SIZE), "float32")
    draws = []
    for _ in range(steps):
        before = [v.numpy().astype(np.float64) for v in model.trainable_variables]
        # Weight 0 for every example: what moves the weights is the noise alone.
        model.train_on_batch(x, x, sample_weight=np.zeros(BATCH))
        after = [v.numpy() for v in model.trainable_variables]
        draws.append([(b - a) / learning_rate for b, a in zip(before, after)])
    return draws


def p_value(sample, stddev):
    return scipy.stats.kstest(np.ravel(sample), scipy.stats.norm(scale=stddev).cdf).pvalue


@pytest.mark.parametrize("jit_compile", [False, True])
def test_case_13_noise_on_the_mean_has_the_promised_law(jit_compile):
    draws = noise_of_training(jit_compile=jit_compile, seed=5)
    sample = np.concatenate([np.ravel(v) for step in draws for v in step])
    assert sample.size == 2 * (SIZE * SIZE + SIZE)
    assert p_value(sample, STDDEV) > 1e-3
    assert p_value(sample, STDDEV * 2 / 3) < 1e-12
    assert p_value(sample, STDDEV * 3 / 2) < 1e-12


def test_case_7_noise_on_microbatches_is_relative_to_their_number():
    draws = noise_of_training(seed=5, num_microbatches=4)
    sample = np.concatenate([np.ravel(v) for step in draws for v in step])
    stddev = NOISE_MULTIPLIER * L2_NORM_CLIP / 4
    assert p_value(sample, stddev) > 1e-3
    assert p_value(sample, stddev * 2 / 3) < 1e-12


def test_draws_are_independent_over_steps_variables_and_optimizers():
    first = noise_of_training(steps=3, seed=1)
    second = noise_of_training(steps=3, seed=2)
    rows = [step[0].ravel() for step in (*first, *second)]
    correlations = np.corrcoef(rows)[np.triu_indices(len(rows), 1)]
    # Of 15 correlations of 1,600 pairs, each N(0, 1/1600), none may be 5 deviations off.
    assert np.abs(correlations).max() < 5 / np.sqrt(SIZE * SIZE)
    key = noise.NoiseKey(3).read()
    sizes = (1600, 1600, 70_000, 70_000)  # Two share a draw, two have their own.
    draws = noise.gaussian_noise(key, 0, dict(enumerate([s] for s in sizes)), 1.0)
    draws = [draws[index][:1600].numpy() for index in range(4)]
    later = noise.gaussian_noise(key, 1, {0: [1600], 2: [70_000]}, 1.0)
    draws += [later[0].numpy(), later[2][:1600].numpy()]
    # Variables that are asked for one at a time get no draw twice either.
    draws += [noise.gaussian_noise(key, 2, {i: [1600]}, 1.0)[i].numpy() for i in range(3)]
    correlations = np.corrcoef(draws)[np.triu_indices(9, 1)]
    assert np.abs(correlations).max() < 5 / np.sqrt(1600)


def test_a_seed_makes_noise_reproducible_and_no_seed_makes_it_unpredictable():
    same = [noise_of_training(seed=9)[0][0] for _ in range(2)]
    np.testing.assert_array_equal(*same)
    fresh = [noise_of_training()[0][0] for _ in range(2)]
    assert np.abs(fresh[0] - fresh[1]).min() > 0


def test_every_bit_of_the_seed_counts():
    keys = [tuple(noise.NoiseKey(seed).read().numpy()) for seed in (0, 1, 2**31, 2**32, 2**63)]
    assert len(set(keys)) == len(keys)


def test_the_tail_reaches_beyond_what_23_random_bits_allow():
    """TensorFlow's own draws end at 5.68, which a delta of 1e-5 can notice."""
    smallest = (0 + 0.5 * 2.0**-9) * 2.0**-32
    assert np.sqrt(-2 * np.log(smallest)) > 7.6
    key = noise.NoiseKey(3).read()
    sample = np.concatenate(
        [noise.gaussian_noise(key, i, {0: [2_000_000]}, 1.0)[0].numpy() for i in range(10)]
    )
    assert np.isfinite(sample).all()
    counts = {edge: np.sum(np.abs(sample) > edge) for edge in (3.0, 4.0, 4.75)}
    for edge, count in counts.items():
        expected = 2 * scipy.stats.norm.sf(edge) * sample.size
        # Poisson counts: five standard deviations.
        assert abs(count - expected) < 5 * np.sqrt(expected), edge


def test_draws_of_a_loop_are_those_of_single_steps():
    """As in steps of which `fit` takes several at once."""
    key, shapes = noise.NoiseKey(2).read(), {0: [1000], 1: [2**18]}
    draw = lambda step: [d[:1000] for d in noise.gaussian_noise(key, step, shapes, 1.0).values()]
    loop = tf.function(lambda: tf.map_fn(draw, tf.range(3), [tf.float32] * 2), autograph=False)
    for step in range(3):
        for looped, single in zip(loop(), draw(step), strict=True):
            np.testing.assert_array_equal(looped[step], single)


def test_draws_are_the_box_muller_transform_of_the_words_in_float64():
    seed, size = tf.constant([5, 7]), 100_000
    words = noise.threefry(seed, tf.range(size), tf.zeros([size], tf.int32))
    first, second = (word.numpy().astype(np.uint64) for word in words)
    uniform = (first * 512 + (second & 511) + 0.5) / 2.0**41
    angle = np.pi * (((second >> 9) + 0.5) / 2.0**23 - 0.5)
    expected = np.sqrt(-2 * np.log(uniform)) * np.sin(angle)
    compiled = tf.function(lambda: noise.standard_normal(seed, size), jit_compile=True)
    for draws in (noise.standard_normal(seed, size), compiled()):
        # A uniform that float32 rounds to 1 has radius 0 instead of at most 2.5e-4.
        np.testing.assert_allclose(draws, expected, rtol=2e-6, atol=3e-4)


def test_logarithms_are_those_of_float64():
    """Of every size that a uniform draw has, and next to 1, where the radius is small."""
    exact = np.random.default_rng(0).uniform(0.5, 1, 100_000) * 2.0 ** -(np.arange(100_000) % 42.0)
    numbers = np.concatenate([exact, 1 - np.arange(1000) * 2.0**-24, [2.0**-42]])
    numbers = numbers[numbers > 0].astype(np.float32)
    compiled = tf.function(noise._log, jit_compile=True)
    for logarithms in (noise._log(tf.constant(numbers)), compiled(tf.constant(numbers))):
        assert np.all(logarithms <= 0)
        np.testing.assert_allclose(logarithms, np.log(numbers.astype(np.float64)), rtol=2e-7)


def test_threefry_gives_the_published_blocks():
    """Known answers of Salmon et al.'s own library, Random123, for 20 rounds."""
    known = {
        ((0, 0), (0, 0)): (0x6B200159, 0x99BA4EFE),
        ((2**32 - 1,) * 2, (2**32 - 1,) * 2): (0x1CB996FC, 0xBB002BE7),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3)): (0xC4923A9C, 0x483DF7A0),
    }
    for (key, counter), block in known.items():
        words = [tf.constant([c], tf.uint32) for c in counter]
        got = noise.threefry(tf.constant(key, tf.uint32), *words)
        assert tuple(int(word[0]) for word in got) == block


@pytest.mark.parametrize("shapes", [{3: []}, {0: [1], 2: [3, 5]}, {1: [300, 400], 4: [7]}, {}])
def test_noise_has_the_shapes_of_the_variables(shapes):
    drawn = noise.gaussian_noise(noise.NoiseKey(1).read(), 0, shapes, 1.0)
    assert {index: draw.shape.as_list() for index, draw in drawn.items()} == shapes


@pytest.mark.parametrize("ahead", [0, 2**18, 2**23])
@pytest.mark.parametrize("jit_compile", [None, False, True])
def test_noise_that_waits_is_the_noise_of_one_call(jit_compile, ahead, monkeypatch):
    monkeypatch.setattr(noise, "_AHEAD", ahead)
    key, shapes = noise.NoiseKey(1).read(), {3: [5], 0: [600, 500], 7: [2**18], 4: [2, 3], 1: []}
    add = lambda step, tensors: noise.add_noise(tensors, key, step, 0.5)
    if jit_compile is not None:
        add = tf.function(add, jit_compile=jit_compile, autograph=False)
    tensors = {index: tf.fill(shape, float(index)) for index, shape in shapes.items()}
    drawn = noise.gaussian_noise(key, 9, shapes, 0.5)
    added = add(tf.constant(9), tensors)
    assert set(added) == set(shapes)
    for index in shapes:
        np.testing.assert_array_equal(added[index], tensors[index] + drawn[index])


@pytest.mark.parametrize("ahead, waiting", [(0, [0, 3, 7]), (2**18, [0, 7]), (2**23, [])])
def test_noise_beyond_some_entries_waits_for_what_it_is_added_to(ahead, waiting, monkeypatch):
    monkeypatch.setattr(noise, "_AHEAD", ahead)
    key, shapes = noise.NoiseKey(1).read(), {3: [5], 0: [600, 500], 7: [2**18]}
    with tf.Graph().as_default():
        tensors = {i: tf.compat.v1.placeholder(tf.float32, shape) for i, shape in shapes.items()}
        added = noise.add_noise(tensors, key.numpy(), 9, 0.5)
        found = []
        for index, total in added.items():
            (of_noise,) = (t.op for t in total.op.inputs if t is not tensors[index])
            seen, left = set(), [of_noise]
            while left:
                operation = left.pop()
                if operation not in seen:
                    seen.add(operation)
                    left += [t.op for t in operation.inputs] + list(operation.control_inputs)
            found += [index] * (tensors[index].op in seen)
    assert sorted(found) == waiting


@pytest.mark.parametrize("seed", [-1, 1.5, "7"])
def test_a_bad_seed_is_refused(seed):
    with pytest.raises(MechanismError, match="noise_seed"):
        noise.NoiseKey(seed)


def test_models_of_many_sizes_compile_few_draws(monkeypatch):
    """One for all variables below 2^18 entries, at most an eighth larger than they are."""
    drawn = []
    draw = lambda key, step, index, size, stddev: (drawn.append(size), tf.zeros([size]))[1]
    monkeypatch.setattr(noise, "_draws", draw)
    for pooled in (1, 1024, 1025, 60_000, 2**18 - 1, 700_001):
        drawn.clear()
        sizes = [pooled] if pooled < 2**18 else [2**18 - 1, 2**18 - 1, pooled - 2**19 + 2]
        shapes = dict(enumerate([(size,) for size in sizes] + [(2**9, 2**9)]))
        found = noise.gaussian_noise(tf.zeros([2], tf.int32), 0, shapes, 1.0)
        assert {i: tuple(v.shape) for i, v in found.items()} == shapes
        large, pool = drawn
        assert large == 2**18 and pooled <= pool <= max(pooled * 9 / 8, pooled + 1024)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
