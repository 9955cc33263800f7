# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What `EpsilonCallback` says to data that its sampler did not draw, and to passes cut short."""

from callbacks_test import DELTA, SAMPLINGS, B, N, Recorder, X, Y, iterations, make_model, spent
import numpy as np
import pytest
import tensorflow as tf

from dice_tf.errors import SamplingError
from dice_tf.ledger import provenance
from dice_tf.sampling import CyclicPoissonSampling, PoissonSampling, ShuffledEpochs
from dice_tf.training.epsilon_callback import EpsilonCallback


@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=repr)
def test_case_8_arrays_are_not_accounted_as_poisson(sampling):
    model = make_model()
    callback = EpsilonCallback(sampling, DELTA)
    fit = lambda **k: model.fit(verbose=0, epochs=3, **k)
    with pytest.raises(SamplingError, match="accounted as `ShuffledEpochs`"):
        fit(x=X, y=Y, batch_size=B, callbacks=[callback])
    assert iterations(model) == 0
    # Without the callback they are trained on, and part of the run for good.
    fit(x=X, y=Y, batch_size=B)
    with pytest.raises(SamplingError, match="steps used batches that it did not draw"):
        fit(x=sampling.dataset(X, Y), callbacks=[callback])


def test_case_8_arrays_are_accounted_by_epoch():
    sampling, model = ShuffledEpochs(N, B), make_model()
    callback = EpsilonCallback(sampling, DELTA)
    history = model.fit(X, Y, batch_size=B, epochs=3, verbose=0, callbacks=[callback]).history
    noise_multiplier = 4.0 / 2  # C1 + C2 is twice C1, and nothing is amplified.
    expected = [gaussian_epsilon(noise_multiplier / np.sqrt(k)) for k in (1, 2, 3)]
    for reported, exact in zip(history["epsilon"], expected):
        assert exact <= reported <= 1.25 * exact + 0.1


def gaussian_epsilon(noise_multiplier):
    """The exact epsilon of one Gaussian mechanism, by bisection (Balle and Wang, 2018)."""
    from scipy.stats import norm

    def delta(epsilon):
        a, b = 0.5 / noise_multiplier, epsilon * noise_multiplier
        return norm.cdf(a - b) - np.exp(epsilon) * norm.cdf(-a - b)

    low, high = 0.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if delta(middle) <= DELTA else (middle, high)
    return high


def tail_dropped():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(7, drop_remainder=True)


@pytest.mark.parametrize(
    "batch_size, fit, echoed",
    [
        (B, lambda m, **k: m.fit(X, Y, batch_size=B, validation_split=0.2, **k), "leaves 48 rows"),
        (B, lambda m, **k: m.fit(X[:50], Y[:50], batch_size=B, **k), "takes 5 steps"),
        (B, lambda m, **k: m.fit(X, Y, batch_size=12, **k), "takes 5 steps"),
        (B, lambda m, **k: m.fit(np.tile(X, (2, 1)), np.tile(Y, (2, 1)), batch_size=B, **k), "12"),
        (B, lambda m, **k: m.fit(X, Y, batch_size=B, steps_per_epoch=3, **k), "takes 3 steps"),
        (7, lambda m, **k: m.fit(tail_dropped(), **k), "takes 8 steps"),
        (7, lambda m, **k: m.fit(tail_dropped().repeat(2), **k), "more than once"),
        (7, lambda m, **k: m.fit(tail_dropped().take(2), **k), "takes 2 steps"),
        (7, lambda m, **k: m.fit(tail_dropped().filter(lambda x, y: True), **k), "unknown number"),
    ],
)
def test_case_15_data_that_contradicts_the_declared_size_is_refused(batch_size, fit, echoed):
    model, sampling = make_model(batch_size=batch_size), ShuffledEpochs(N, batch_size)
    with pytest.raises(SamplingError) as caught:
        fit(model, callbacks=[EpsilonCallback(sampling, DELTA)], verbose=0)
    assert echoed in str(caught.value) and repr(sampling) in str(caught.value)
    assert iterations(model) == 0


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda d: d.cache(), "are cached"),
        (lambda d: d.shuffle(50), "`shuffle` stands between"),
        (lambda d: d.map(lambda x, y, w: (x, y, None)), "did not draw"),
        (lambda d: d.take(3), "`take` stands between.*pass `steps_per_epoch`"),
        (lambda d: CyclicPoissonSampling(N, B).dataset(X, Y), "the very object"),
        (lambda d: PoissonSampling(N, B).dataset(X, Y), "draws. Pass the callback the very object"),
    ],
)
def test_data_sets_that_are_not_fresh_draws_in_order_are_refused(change, message):
    sampling, model = CyclicPoissonSampling(N, B), make_model()
    data = change(sampling.dataset(X, Y))
    with pytest.raises(SamplingError, match=message):
        model.fit(data, epochs=4, verbose=0, callbacks=[EpsilonCallback(sampling, DELTA)])


def test_poisson_batches_are_not_accounted_as_shuffled():
    model = make_model()
    with pytest.raises(SamplingError, match="batches of a Poisson sampler"):
        model.fit(
            PoissonSampling(N, B).dataset(X, Y),
            verbose=0,
            callbacks=[EpsilonCallback(ShuffledEpochs(N, B), DELTA)],
        )
    assert iterations(model) == 0


def test_cyclic_run_that_was_cut_within_a_cycle_goes_on_with_a_fresh_one():
    sampling, model = CyclicPoissonSampling(N, B, num_groups=3), make_model()
    callback, data = EpsilonCallback(sampling, DELTA), sampling.dataset(X, Y)
    model.fit(data, verbose=0, callbacks=[callback, Recorder(stop_at=4)])
    assert iterations(model) == 4
    assert any(np.abs(error.numpy()).max() > 0 for error in model.optimizer.errors)
    assert callback.epsilon() == spent(model, sampling, 6)  # 4 steps begin a second round.

    recorder = Recorder()
    model.fit(data, verbose=0, callbacks=[callback, recorder])
    assert all(not error.any() for error in recorder.errors)
    assert iterations(model) == 4 + 6 and callback.accounted_steps() == 6 + 6
    assert callback.epsilon() == spent(model, sampling, 12)
    # Whole cycles go on without loss.
    model.fit(data, verbose=0, callbacks=[callback, recorder])
    assert any(error.any() for error in recorder.errors)
    assert callback.accounted_steps() == 18


def test_cyclic_run_that_was_cut_and_went_on_in_another_loop_is_refused():
    sampling, model = CyclicPoissonSampling(N, B), make_model()
    callback, data = EpsilonCallback(sampling, DELTA), sampling.dataset(X, Y)
    for batches in (data.take(3), data):
        for batch in batches:
            model.train_on_batch(*batch)
    with pytest.raises(SamplingError, match="after 1 steps, not 2"):
        model.fit(data, verbose=0, callbacks=[callback])


def test_shuffled_epoch_that_was_cut_counts_in_full():
    sampling, model = ShuffledEpochs(N, B), make_model()
    callback = EpsilonCallback(sampling, DELTA)
    fit = lambda **k: model.fit(X, Y, batch_size=B, verbose=0, **k)
    for _ in range(3):
        fit(callbacks=[callback, Recorder(stop_at=iterations(model) + 2)])
    # An example may have been first in each of the three.
    assert iterations(model) == 6 and callback.epsilon() == spent(model, sampling, 18)
    record = provenance.unpack_record(model.optimizer.sampling_record.numpy())
    assert record["unfinished_steps"] == 8  # The third pass is still open.
    fit(callbacks=[callback])
    assert callback.epsilon() == spent(model, sampling, 24)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
