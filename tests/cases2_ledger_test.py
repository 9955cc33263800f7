# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The record of a run: whose steps they are, where they came from, and what they cost together.

Each test is named after its line in the list of failures that real use has shown.
"""

import math
import warnings

import dp_accounting
from dp_accounting import rdp
import keras
import numpy as np
import pytest
from scipy import stats
import tensorflow as tf

import dice_tf
from dice_tf import accounting
from dice_tf.errors import AccountingError, SamplingError
from dice_tf.ledger import provenance

N, B, DELTA = 80, 10, 1e-3
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(N, 3)).astype("float32")
Y = RANDOM.normal(size=(N, 1)).astype("float32")

pytestmark = [
    pytest.mark.filterwarnings("ignore::dice_tf.errors.UnaccountedStepsWarning"),
    pytest.mark.filterwarnings("ignore:This file holds the error"),
]


def make(noise_multiplier=5.0, layers=1, built=True, optimizer=dice_tf.DiceSGDOptimizer, **extra):
    keras.utils.set_random_seed(0)
    head = [keras.layers.Dense(1)]
    hidden = [keras.layers.Dense(2) for _ in range(layers - 1)]
    model = keras.Sequential([*([keras.Input((3,))] if built else []), *hidden, *head])
    model.compile(make_optimizer(noise_multiplier, optimizer, **extra), "mse", jit_compile=False)
    return model


def make_optimizer(noise_multiplier=5.0, optimizer=dice_tf.DiceSGDOptimizer, **extra):
    return optimizer(
        0.1, l2_norm_clip=1.0, noise_multiplier=noise_multiplier, expected_batch_size=B, **extra
    )


def fit(model, sampling, epochs=1, **arguments):
    return model.fit(sampling.dataset(X, Y), epochs=epochs, verbose=0, **arguments)


def planned(model, sampling, steps, accountant="rdp"):
    return accounting.compute_epsilon(model.optimizer.mechanism, sampling, steps, DELTA, accountant)


def record(model):
    return provenance.read_record(model.optimizer)


def test_the_epsilon_of_several_runs_is_that_of_their_composition():
    mechanism = dice_tf.DiceMechanism(l2_norm_clip=1.0, noise_multiplier=4.0, expected_batch_size=B)
    poisson, cyclic = dice_tf.PoissonSampling(N, B), dice_tf.CyclicPoissonSampling(N, B)
    shuffled = dice_tf.ShuffledEpochs(N, B)
    for run in [(mechanism, poisson, 8), (mechanism, cyclic, 9), (mechanism, shuffled, 16)]:
        for by in ("rdp", "pld"):
            one = accounting.compose_epsilon([run], DELTA, by)
            assert one == accounting.compute_epsilon(*run, DELTA, by)
    runs = [(mechanism, poisson, 8), (mechanism, cyclic, 9), (mechanism, poisson, 0)]
    independent = rdp.RdpAccountant()
    for run in runs:
        independent.compose(accounting.dp_event(*run))
    epsilons = [accounting.compose_epsilon(runs, DELTA, by) for by in ("rdp", "pld")]
    assert epsilons[0] == pytest.approx(independent.get_epsilon(DELTA), rel=0.01)
    assert epsilons[1] < epsilons[0] < sum(accounting.compute_epsilon(*r, DELTA) for r in runs)
    # Three Gaussian releases are one with less noise, whose delta is known exactly.
    tight = accounting.compose_epsilon([(mechanism, shuffled, 8)] * 3, DELTA, "pld")
    noise = 4.0 / 2 / math.sqrt(3)
    exact = stats.norm.cdf(0.5 / noise - tight * noise) - math.exp(tight) * stats.norm.cdf(
        -0.5 / noise - tight * noise
    )
    assert exact == pytest.approx(DELTA, rel=0.02) and exact <= DELTA
    assert accounting.compose_epsilon([], DELTA) == 0


def test_runs_that_do_not_compose_are_refused():
    arguments = dict(l2_norm_clip=1.0, noise_multiplier=4.0, expected_batch_size=B)
    means = dice_tf.DiceMechanism(**arguments, num_microbatches=5)
    with pytest.raises(AccountingError, match="num_microbatches=5"):
        accounting.compose_epsilon(
            [(means, dice_tf.PoissonSampling(N, B), 8), (means, dice_tf.ShuffledEpochs(N, B), 8)],
            DELTA,
        )
    with pytest.raises(AccountingError, match="list of `\\(mechanism, sampling, steps\\)`"):
        accounting.compose_epsilon([dp_accounting.GaussianDpEvent(1.0)], DELTA)
    silent = dice_tf.DiceMechanism(**{**arguments, "noise_multiplier": 0.0})
    noiseless = (silent, dice_tf.PoissonSampling(N, B), 1)
    assert accounting.compose_epsilon([noiseless], DELTA) == np.inf


# --- D4: one way to ask -------------------------------------------------------------


@pytest.mark.parametrize("kind", [dice_tf.CyclicPoissonSampling, dice_tf.ShuffledEpochs])
def test_d4_passes_that_were_cut_short_are_in_the_epsilon_of_the_run(kind):
    sampling, model = kind(N, B), make()
    for _ in range(3):
        model.fit(sampling.dataset(X, Y), steps_per_epoch=3, verbose=0)
    made, whole = 9, 3 + 3 + 3 + 2 * (-3 % sampling.steps_per_round)
    assert int(model.optimizer.iterations) == made
    assert dice_tf.accounted_run(model, sampling) == (model.optimizer.mechanism, sampling, whole)
    epsilon = dice_tf.run_epsilon(model, sampling, DELTA)
    assert epsilon == planned(model, sampling, whole) > planned(model, sampling, made)
    assert dice_tf.run_epsilon(model, sampling, DELTA, "pld") == planned(
        model, sampling, whole, "pld"
    )
    callback = dice_tf.EpsilonCallback(sampling, DELTA)
    callback.set_model(model)
    assert callback.epsilon() == epsilon
    assert callback.statement() == dice_tf.run_statement(model, sampling, DELTA)


@pytest.mark.parametrize("ask", [accounting.compute_epsilon, accounting.privacy_statement])
def test_d4_the_counter_itself_is_no_number_of_steps(ask):
    optimizer, sampling = make().optimizer, dice_tf.PoissonSampling(N, B)
    for counter in (optimizer.iterations, optimizer.iterations.value):
        with pytest.raises(AccountingError, match="`steps` is a variable.*run_epsilon"):
            ask(optimizer.mechanism, sampling, counter, DELTA)


# --- D7: seeds are named ------------------------------------------------------------


def test_d7_seeds_of_earlier_samplers_and_optimizers_are_named(tmp_path):
    sampling, model = dice_tf.PoissonSampling(N, B), make(noise_seed=1)
    fit(model, dice_tf.PoissonSampling(N, B, seed=3))
    model.save_weights(tmp_path / "run.weights.h5")
    later = make()
    later.load_weights(tmp_path / "run.weights.h5")
    fit(later, sampling)
    text = dice_tf.run_statement(later, sampling, DELTA)
    assert "The noise was drawn from a seed" in text and "draws are secret            False" in text
    assert "Draws came from a seed that was set in the program: they are NOT secret" in text
    fresh = make()
    fit(fresh, sampling)
    text = dice_tf.run_statement(fresh, sampling, DELTA)
    assert "seed" not in text and "draws are secret            True" in text


def test_d7_a_seeded_sampler_that_drew_nothing_is_not_named():
    fields = provenance.unpack_record(provenance.initial_record())
    seeded, sampling = dice_tf.PoissonSampling(N, B, seed=3), dice_tf.PoissonSampling(N, B)
    fields = provenance.join_sampling(provenance.join_sampling(fields, seeded), sampling)
    assert not provenance.draws_were_seeded(dict(fields, steps=8))
    fields = provenance.join_sampling(dict(fields, steps=8), seeded)
    assert not provenance.draws_were_seeded(fields)
    fields = provenance.join_sampling(dict(fields, steps=9), sampling)
    assert provenance.draws_were_seeded(fields)


# --- D10: no sampler goes back ------------------------------------------------------


def batches_of(model, sampling):
    """Trains for an epoch; returns the rows of each batch, by their first feature."""
    seen = []

    def note(x, y, w):
        seen.append(sorted(x[w > 0, 0].tolist()))
        return np.float32(0)

    def peek(x, y, w):
        zero = tf.numpy_function(note, [x, y, w], tf.float32)
        return x, y + tf.reshape(zero, []), w

    model.fit(sampling.dataset(X, Y).map(peek), verbose=0)
    return seen


def test_d10_loading_one_models_file_does_not_rewind_the_sampler_under_another(tmp_path):
    path, sampling = tmp_path / "b.weights.h5", dice_tf.CyclicPoissonSampling(N, B)
    a, b = make(save_errors=True), make(save_errors=True)
    batches_of(a, sampling), batches_of(b, sampling)
    b.save_weights(path)
    batches_of(b, sampling)
    before = batches_of(a, sampling)
    b.load_weights(path)
    with pytest.warns(UserWarning, match="made the draws from step 16 on before.*fresh draws"):
        replayed = batches_of(b, sampling)
    after = batches_of(a, sampling)
    assert not {tuple(batch) for batch in before} & {tuple(batch) for batch in after + replayed}
    # For this model nothing is lost but the repetition.
    assert dice_tf.accounted_run(b, sampling)[2] == 16
    resumed, again = make(save_errors=True), dice_tf.CyclicPoissonSampling(N, B)
    resumed.load_weights(path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="This sampling object")
        batches_of(resumed, again)
    assert again.entropy == sampling.entropy and again.position == 24


# --- D11: steps outside `fit` -------------------------------------------------------


def test_d11_steps_on_one_batch_are_not_epochs():
    sampling, model = dice_tf.ShuffledEpochs(N, B), make()
    for _ in range(12):
        model.train_on_batch(X[:B], Y[:B])
    callback = dice_tf.EpsilonCallback(sampling, DELTA)
    with pytest.raises(SamplingError, match="12 of 12 steps were made outside `fit`") as caught:
        model.fit(X, Y, batch_size=B, verbose=0, callbacks=[callback])
    with pytest.raises(SamplingError, match="outside `fit`"):
        dice_tf.run_epsilon(model, sampling, DELTA)
    # The remedy: every step is a release without amplification, and composes as such.
    assert f"`ShuffledEpochs({B}, {B})`" in str(caught.value)
    epsilon = dice_tf.run_epsilon(model, dice_tf.ShuffledEpochs(B, B), DELTA, "pld")
    noise = 5.0 / 2 / math.sqrt(12)
    exact = stats.norm.cdf(0.5 / noise - epsilon * noise) - math.exp(epsilon) * stats.norm.cdf(
        -0.5 / noise - epsilon * noise
    )
    assert exact == pytest.approx(DELTA, rel=0.02) and exact <= DELTA


def test_d11_fit_knows_its_steps_and_marks_tell_of_others():
    sampling, model = dice_tf.ShuffledEpochs(N, B), make(built=False)
    callback = dice_tf.EpsilonCallback(sampling, DELTA)
    model.fit(X, Y, batch_size=B, verbose=0)
    model.fit(X, Y, batch_size=B, verbose=0, callbacks=[callback])
    assert callback.accounted_steps() == 16 and record(model)["loop_steps"] == 0
    model.train_on_batch(X[:B], Y[:B])
    assert record(model)["loop_steps"] == 1
    # Whole batches of all examples are epochs, whoever hands them over.
    everything = dice_tf.ShuffledEpochs(B, B)
    loop = make()
    for _ in range(3):
        loop.train_on_batch(X[:B], Y[:B])
    assert dice_tf.run_epsilon(loop, everything, DELTA) == planned(loop, everything, 3)
    # A Poisson sampler's batches say who drew them: a loop over them has its epsilon, and none as
    # epochs.
    drawn, poisson = make(), dice_tf.PoissonSampling(N, B)
    for batch in poisson.dataset(X, Y):
        dice_tf.private_train_step(drawn, batch)
    assert record(drawn)["loop_steps"] == 8
    assert dice_tf.run_epsilon(drawn, poisson, DELTA) == planned(drawn, poisson, 8)
    for epochs in (sampling, everything):
        with pytest.raises(SamplingError, match="it used batches of a Poisson sampler"):
            dice_tf.run_epsilon(drawn, epochs, DELTA)


# --- B16: one accountant ------------------------------------------------------------


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_b16_the_bar_and_the_statement_show_one_epsilon(accountant):
    sampling, model = dice_tf.CyclicPoissonSampling(N, B), make()
    callback = dice_tf.EpsilonCallback(sampling, DELTA, accountant=accountant)
    shown = fit(model, sampling, callbacks=[callback]).history["epsilon"][-1]
    text = callback.statement()
    epsilon = accounting.epsilon.up(shown)
    assert shown == planned(model, sampling, 8, accountant)
    assert f"epsilon = {epsilon} ({accountant.upper()} accountant)" in " ".join(text.split())
    assert f"epsilon by the {accountant.upper()} accountant: {epsilon}\n" in text
    other = "pld" if accountant == "rdp" else "rdp"
    beside = accounting.epsilon.up(planned(model, sampling, 8, other))
    assert f"{other.upper()} accountant: {beside} (for information" in text
    assert text == dice_tf.run_statement(model, sampling, DELTA, accountant)
    with pytest.raises(AccountingError, match="accountant='prv'"):
        accounting.privacy_statement(model.optimizer.mechanism, sampling, 8, DELTA, "prv")


# --- B18: data of unknown length ----------------------------------------------------


@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_b18_the_end_of_data_of_unknown_length_is_no_step(steps_per_execution):
    model = make(use_ema=True)
    model.compile(
        model.optimizer, "mse", jit_compile=False, steps_per_execution=steps_per_execution
    )
    unknown = tf.data.Dataset.from_tensor_slices((X, Y)).batch(B).filter(lambda x, y: True)
    model.fit(unknown, epochs=3, verbose=0)
    private = model.optimizer._private
    counts = (model.optimizer.iterations, private.process_draws, private.error_step)
    assert [int(count) for count in counts] == [24, 24, 24] and record(model)["steps"] == 24
    # Nobody saw whether an epoch is one pass, so each step counts as one.
    each = dice_tf.ShuffledEpochs(B, B)
    assert dice_tf.run_epsilon(model, each, DELTA) == planned(model, each, 24)
    with pytest.raises(dice_tf.errors.SamplingError, match="need not be one pass"):
        dice_tf.run_epsilon(model, dice_tf.ShuffledEpochs(N, B), DELTA)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
