# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""EpsilonCallback reports what was spent, stops in time and refuses false claims."""

import types

import keras
import numpy as np
import pytest

from dice_tf import accounting
from dice_tf.accounting.epsilon import up
from dice_tf.errors import AccountingError, BudgetExhaustedError, PlainGradientsError, SamplingError
from dice_tf.ledger import provenance
from dice_tf.mechanism import DiceMechanism
from dice_tf.sampling import CyclicPoissonSampling, PoissonSampling, ShuffledEpochs
from dice_tf.training import epsilon_callback
from dice_tf.training.epsilon_callback import EpsilonCallback
from dice_tf.training.optimizers import DiceSGDOptimizer

N, B, DELTA = 60, 10, 1e-3
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(N, 3)).astype("float32"), RNG.normal(size=(N, 1)).astype("float32")

SAMPLINGS = [PoissonSampling(N, B), CyclicPoissonSampling(N, B), ShuffledEpochs(N, B)]


def make_model(noise_multiplier=4.0, batch_size=B, model_class=keras.Sequential, **compile_args):
    model = model_class([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = DiceSGDOptimizer(
        learning_rate=0.1,
        l2_norm_clip=0.1,
        noise_multiplier=noise_multiplier,
        expected_batch_size=batch_size,
        noise_seed=0,
    )
    model.compile(optimizer, loss="mse", **compile_args)
    return model


def spent(model, sampling, steps, accountant="rdp"):
    return accounting.compute_epsilon(
        model.optimizer.mechanism, sampling, steps, DELTA, accountant=accountant
    )


def iterations(model):
    return int(model.optimizer.iterations)


class Recorder(keras.callbacks.Callback):
    """Keeps the logs of every batch, and the error as an epoch begins; stops where it is told."""

    def __init__(self, stop_at=None):
        super().__init__()
        self.batches, self.errors, self.stop_at = [], None, stop_at

    def on_epoch_begin(self, epoch, logs=None):
        self.errors = [error.numpy() for error in self.model.optimizer.errors]

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(dict(logs))
        if iterations(self.model) == self.stop_at:
            self.model.stop_training = True


@pytest.mark.parametrize("sampling, accountant", list(zip(SAMPLINGS, ["rdp", "pld", "rdp"])))
def test_logs_hold_the_epsilon_of_the_steps_made(sampling, accountant):
    model, recorder = make_model(), Recorder()
    callback = EpsilonCallback(sampling, DELTA, accountant=accountant)
    history = model.fit(
        sampling.dataset(X, Y), epochs=2, verbose=0, callbacks=[callback, recorder]
    ).history
    steps = sampling.steps_per_epoch
    expected = [spent(model, sampling, steps * epoch, accountant) for epoch in (1, 2)]
    np.testing.assert_allclose(history["epsilon"], expected, rtol=1e-12)
    assert callback.epsilon() == pytest.approx(expected[-1], rel=1e-12)
    # So short a run is updated at every batch: the value is exact there too.
    np.testing.assert_allclose(
        [logs["epsilon"] for logs in recorder.batches],
        [spent(model, sampling, t + 1, accountant) for t in range(2 * steps)],
        rtol=1e-12,
    )


def test_progress_bar_and_csv_log_show_epsilon(tmp_path, capsys):
    sampling, model = CyclicPoissonSampling(N, B), make_model()
    log = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    callback = EpsilonCallback(sampling, DELTA)
    model.fit(sampling.dataset(X, Y), verbose=2, callbacks=[callback, log])
    assert f"epsilon: {callback.epsilon():.4f}" in capsys.readouterr().out
    header, values = (tmp_path / "log.csv").read_text().split()
    row = dict(zip(header.split(","), values.split(",")))
    assert float(row["epsilon"]) == callback.epsilon()


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=repr)
@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_training_stops_before_the_step_that_would_pass_the_target(sampling, steps_per_execution):
    model = make_model(steps_per_execution=steps_per_execution)
    target = spent(model, sampling, 17) * 1.001
    # Brute force, one step after the other.
    affordable = next(t for t in range(1, 100) if spent(model, sampling, t) > target) - 1
    callback = EpsilonCallback(sampling, DELTA, target_epsilon=target)
    data = sampling.dataset(X, Y, planned_epochs=10)
    history = model.fit(data, epochs=10, verbose=0, callbacks=[callback])
    assert affordable >= 17 and len(history.history["epsilon"]) < 10
    assert affordable - steps_per_execution < iterations(model) <= affordable
    assert callback.epsilon() <= target
    assert history.history["epsilon"][-1] == callback.epsilon()
    if steps_per_execution == 1:
        assert spent(model, sampling, iterations(model) + 1) > target

    # And no step more, however often `fit` is called.
    before = iterations(model), [w.copy() for w in model.get_weights()]
    with pytest.raises(BudgetExhaustedError) as caught:
        model.fit(data, epochs=1, verbose=0, callbacks=[callback])
    assert f"target_epsilon={target}" in str(caught.value)
    assert iterations(model) == before[0]
    for old, new in zip(before[1], model.get_weights()):
        np.testing.assert_array_equal(old, new)


def test_case_12_a_run_calibrated_for_its_epochs_makes_all_of_them():
    sampling, target, epochs = CyclicPoissonSampling(N, B), 5.0, 3
    noise_multiplier = accounting.calibrate_noise_multiplier(
        target, DELTA, sampling, sampling.steps(epochs), l2_norm_clip=0.1
    )
    model = make_model(noise_multiplier)
    callback = EpsilonCallback(sampling, DELTA, target_epsilon=target)
    model.fit(
        sampling.dataset(X, Y, planned_epochs=epochs), epochs=9, verbose=0, callbacks=[callback]
    )
    assert iterations(model) == sampling.steps(epochs)
    assert callback.epsilon() == pytest.approx(target, rel=1e-2) and callback.epsilon() <= target


class TwoSteps(keras.Sequential):
    """A user's model that takes two private steps per batch."""

    def train_step(self, data):
        super().train_step(data)
        return super().train_step(data)


@pytest.mark.parametrize("sampling", [*SAMPLINGS, None], ids=repr)
def test_batches_that_take_several_steps_are_refused(sampling):
    # Within an epoch of arrays, more entries of an example than rounds would be made.
    model, data = make_model(model_class=TwoSteps), dict(x=X, y=Y, batch_size=B)
    if sampling:
        data = dict(x=sampling.dataset(X, Y))
    with pytest.raises(SamplingError, match="made 2 steps, but had only 1 batches|after 1 steps"):
        callback = EpsilonCallback(sampling or ShuffledEpochs(N, B), DELTA)
        model.fit(**data, verbose=0, callbacks=[callback])
    assert iterations(model) == 2


def test_budget_that_allows_no_step_is_refused_before_the_first():
    sampling, model = PoissonSampling(N, B), make_model(noise_multiplier=0.3)
    callback = EpsilonCallback(sampling, DELTA, target_epsilon=0.5)
    weights = model.get_weights()
    with pytest.raises(BudgetExhaustedError, match="target_epsilon=0.5 .* allows 0 steps"):
        model.fit(sampling.dataset(X, Y), verbose=0, callbacks=[callback])
    assert iterations(model) == 0
    np.testing.assert_array_equal(weights[0], model.get_weights()[0])


def test_case_16_a_thousand_queries_change_nothing():
    sampling, model = CyclicPoissonSampling(N, B), make_model()
    callback = EpsilonCallback(sampling, DELTA, target_epsilon=50.0)
    model.fit(sampling.dataset(X, Y), verbose=0, callbacks=[callback])
    variables = [v.numpy() for v in [*model.variables, *model.optimizer.variables]]
    draws, first = sampling.draws, callback.epsilon()
    assert {callback.epsilon() for _ in range(1000)} == {first}
    assert sampling.draws == draws
    for before, after in zip(variables, [*model.variables, *model.optimizer.variables]):
        np.testing.assert_array_equal(before, after.numpy())
    # Nor do queries between steps: the next epoch costs what it costs without them.
    model.fit(sampling.dataset(X, Y), verbose=0, callbacks=[callback])
    assert callback.epsilon() == spent(model, sampling, 2 * sampling.steps_per_epoch)


def test_epsilon_in_a_loop_is_that_of_steps_on_the_batches_drawn():
    sampling, model = CyclicPoissonSampling(N, B), make_model()
    callback = EpsilonCallback(sampling, DELTA)
    for ask in (callback.epsilon, callback.accounted_steps, callback.statement):
        with pytest.raises(AccountingError, match="no model yet.*set_model"):
            ask()
    callback.set_model(model)
    assert callback.epsilon() == 0
    for batch in sampling.dataset(X, Y):
        model.train_on_batch(*batch)
    assert callback.epsilon() == spent(model, sampling, 6)
    assert callback.statement() == accounting.privacy_statement(
        model.optimizer.mechanism, sampling, 6, DELTA
    )
    for x, y, _ in sampling.dataset(X, Y).take(1):
        model.train_on_batch(x, y)
    for ask in (callback.epsilon, callback.statement):
        with pytest.raises(SamplingError, match="1 of 7 steps used batches that it did not draw"):
            ask()
    model.compile("sgd", "mse")
    with pytest.raises(PlainGradientsError, match="optimizer=SGD"):
        callback.epsilon()


class RecordOfSteps:
    """The sampling record of an optimizer that made `count` steps."""

    def __init__(self, count, mechanism):
        self.count, self.mechanism = count, mechanism

    def numpy(self):
        fields = provenance.unpack_record(provenance.initial_record())
        name = provenance.mechanism_name(self.mechanism)
        return provenance.pack_record(dict(fields, steps=self.count.numpy(), mechanism=name))

    def __array__(self, dtype=None, copy=None):
        return self.numpy()

    def assign(self, record):
        assert provenance.unpack_record(record)["steps"] == self.count.numpy()


def test_epsilon_is_computed_seldom(monkeypatch):
    calls = []
    monkeypatch.setattr(
        accounting, "compute_epsilon", lambda *args, **kwargs: calls.append(args) or 1.0
    )
    mechanism = DiceMechanism(l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=B)
    count = types.SimpleNamespace(numpy=lambda: callback.made)
    callback = EpsilonCallback(ShuffledEpochs(10_000 * B, B), 1e-9, target_epsilon=2.0)
    callback.made = 0
    optimizer = types.SimpleNamespace(mechanism=mechanism, iterations=count, built=True)
    optimizer.save_errors, optimizer.errors = False, []
    optimizer.sampling_record = RecordOfSteps(count, mechanism)
    counts = types.SimpleNamespace(
        numpy=lambda: np.zeros(3), value=np.zeros(3, np.int64), assign=lambda value: None
    )
    optimizer._private = types.SimpleNamespace(
        process_draws=count, row_counts=counts, steps_here=count.numpy, row_order=None
    )
    callback.set_model(
        types.SimpleNamespace(
            optimizer=optimizer,
            steps_per_execution=1,
            stop_training=False,
            built=True,
            trainable_variables=[],
        )
    )
    callback.set_params({"epochs": 5, "steps": 10_000})
    # The most expensive case: every step is a round of its own.
    monkeypatch.setattr(epsilon_callback.events, "is_unbounded", lambda mechanism: True)
    callback.on_train_begin()
    for epoch in range(5):
        callback.on_epoch_begin(epoch)
        for batch in range(10_000):
            callback.on_train_batch_begin(batch)
            callback.made += 1
            callback.on_train_batch_end(batch, {})
        callback.on_epoch_end(epoch, {})
    assert 50 < len(calls) < 120


def test_resumed_run_reports_the_whole_run(tmp_path):
    sampling, model = CyclicPoissonSampling(N, B), make_model()
    callback = EpsilonCallback(sampling, DELTA)
    model.fit(sampling.dataset(X, Y), verbose=0, callbacks=[callback])
    model.save(tmp_path / "model.keras")
    resumed = keras.models.load_model(tmp_path / "model.keras")
    again = EpsilonCallback(sampling, DELTA)
    history = resumed.fit(sampling.dataset(X, Y), verbose=0, callbacks=[again]).history
    assert history["epsilon"] == [spent(model, sampling, 2 * sampling.steps_per_epoch)]


@pytest.mark.parametrize("verbose", [0, 2])
def test_end_of_the_budget_is_said_unless_told_to_be_silent(verbose, capsys):
    sampling, model = PoissonSampling(N, B), make_model()

    def fit(target):
        callback = EpsilonCallback(sampling, DELTA, target)
        model.fit(sampling.dataset(X, Y), verbose=verbose, callbacks=[callback])

    fit(target=1000.0)
    assert "ended training" not in capsys.readouterr().out
    target = spent(model, sampling, 6 + 4)
    fit(target)
    line = f"ended training after 10 steps at epsilon={up(target)}: more would exceed target_eps"
    assert (line in capsys.readouterr().out) == (verbose > 0)


def test_nothing_is_said_if_the_last_planned_step_spends_the_budget(capsys):
    sampling, model = PoissonSampling(N, B), make_model()
    callback = EpsilonCallback(sampling, DELTA, target_epsilon=spent(model, sampling, 12))
    model.fit(sampling.dataset(X, Y), epochs=2, verbose=2, callbacks=[callback])
    assert iterations(model) == 12 and "ended training" not in capsys.readouterr().out


def test_no_noise_is_reported_as_infinite(capsys):
    sampling = CyclicPoissonSampling(N, B)
    with pytest.warns(UserWarning, match="not private"):
        model = make_model(noise_multiplier=0.0)
    callback = EpsilonCallback(sampling, DELTA)
    history = model.fit(sampling.dataset(X, Y), verbose=2, callbacks=[callback]).history
    assert history["epsilon"] == [np.inf] and callback.epsilon() == np.inf
    assert "epsilon: inf" in capsys.readouterr().out
    with pytest.raises(BudgetExhaustedError):
        callback = EpsilonCallback(sampling, DELTA, target_epsilon=1e6)
        model.fit(sampling.dataset(X, Y), verbose=0, callbacks=[callback])


def test_model_that_is_built_by_its_first_batch():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(make_model().optimizer, loss="mse")
    sampling = CyclicPoissonSampling(N, B)
    callback = EpsilonCallback(sampling, DELTA, target_epsilon=50.0)
    model.fit(sampling.dataset(X, Y), verbose=0, callbacks=[callback])
    assert callback.epsilon() == spent(model, sampling, sampling.steps_per_epoch)


def test_plain_optimizer_is_refused():
    model = make_model()
    model.compile("sgd", loss="mse")
    sampling = PoissonSampling(N, B)
    with pytest.raises(PlainGradientsError, match="there is no epsilon.*optimizer=SGD"):
        model.fit(sampling.dataset(X, Y), verbose=0, callbacks=[EpsilonCallback(sampling, DELTA)])


def test_other_batch_size_than_the_optimizers_is_refused():
    sampling = PoissonSampling(N, 2 * B)
    with pytest.raises(AccountingError) as caught:
        make_model().fit(
            sampling.dataset(X, Y), verbose=0, callbacks=[EpsilonCallback(sampling, DELTA)]
        )
    assert f"expected_batch_size={B}" in str(caught.value)
    assert f"expected_batch_size={2 * B}" in str(caught.value)


@pytest.mark.parametrize(
    "arguments, echoed",
    [
        ({"delta": 1 / N}, ["1/60", "delta="]),
        ({"delta": 0.0}, ["delta=0.0"]),
        ({"delta": "1e-5"}, ["delta='1e-5'"]),
        ({"target_epsilon": 0.0}, ["target_epsilon=0.0"]),
        ({"target_epsilon": float("nan")}, ["target_epsilon=nan"]),
        ({"accountant": "moments"}, ["accountant='moments'", "pld"]),
        ({"sampling": 0.01}, ["sampling=0.01", "PoissonSampling"]),
    ],
)
def test_case_11_bad_arguments_are_refused(arguments, echoed):
    with pytest.raises(AccountingError) as caught:
        EpsilonCallback(**{"sampling": PoissonSampling(N, B), "delta": DELTA, **arguments})
    for text in echoed:
        assert text in str(caught.value)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
