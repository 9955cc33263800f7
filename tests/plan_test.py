# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""`PrivacyPlan`: nothing but the layer below it, said once."""

import dataclasses
import re

import keras
import numpy as np
import pytest

import dice_tf
from dice_tf import accounting
from dice_tf.errors import (
    AccountingError,
    BudgetExhaustedError,
    DicePrivacyError,
    MechanismError,
    PlainGradientsError,
    SamplingError,
)
from dice_tf.mechanism import DiceMechanism
from dice_tf.plan import PrivacyPlan
from dice_tf.sampling import CyclicPoissonSampling, PoissonSampling

ACCOUNTANTS = ["pld", "rdp"]

# The five lines of a user, as the documentation has them, with numbers for a test.
FIVE_LINES = """\
plan = dice_tf.PrivacyPlan(num_examples=len(x), batch_size=20, epochs=3, target_epsilon=3.0, delta=1e-4{more})
model.compile(dice_tf.DiceSGDOptimizer(learning_rate=0.1, momentum=0.9, l2_norm_clip=0.25, plan=plan), loss="sparse_categorical_crossentropy")
model.fit(plan.dataset(x, y), epochs=plan.epochs, validation_data=(x_val, y_val), callbacks=[plan.callback()])
print(plan.statement(model))
"""  # noqa: E501


def make_model(width=3):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(width, activation="softmax", name="dense")]
    )


def make_data(count=200):
    random = np.random.default_rng(0)
    y = random.integers(0, 3, count)
    return random.normal(size=(count, 4)).astype("float32"), y


def run_five_lines(more=""):
    x, y = make_data()
    names = dict(x=x, y=y, x_val=x[:9], y_val=y[:9], model=make_model(), dice_tf=dice_tf)
    lines = FIVE_LINES.format(more=more).replace("callbacks=", "verbose=2, callbacks=")
    exec(lines, names)  # Our own lines.
    return names["plan"], names["model"]


@pytest.mark.parametrize("more", ["", ', accountant="rdp"', ", feedback_steps=3"])
def test_b16_one_epsilon_for_one_run(more, capsys):
    plan, model = run_five_lines(more)
    output = capsys.readouterr().out
    history = model.history.history
    # The budget lets all epochs run, and the bar ends with the epsilon of the plan.
    assert len(history["epsilon"]) == plan.epochs == 3
    assert int(model.optimizer.iterations) == plan.steps == plan.sampling.steps(3)
    assert history["epsilon"][-1] == plan.epsilon() <= 3.0
    assert (
        2.995
        < plan.epsilon()
        == accounting.compute_epsilon(
            model.optimizer.mechanism, plan.sampling, plan.steps, 1e-4, accountant=plan.accountant
        )
    )
    # The statement guarantees that one, and has the other beside it.
    statement = " ".join(output[output.index("GUARANTEE") :].split())
    shown = accounting.epsilon.up(plan.epsilon())
    (other,) = {"rdp", "pld"} - {plan.accountant}
    name = plan.accountant.upper()
    assert f"private with epsilon = {shown} ({name} accountant) and delta = 0.0001" in statement
    assert f"{name} accountant: {shown}" in statement
    assert f"{name} accountant: {shown} (for information" not in statement
    by_other = accounting.compute_epsilon(
        plan.mechanism(), plan.sampling, plan.steps, 1e-4, accountant=other
    )
    beside = f"{other.upper()} accountant: {accounting.epsilon.up(by_other)}"
    assert f"{beside} (for information: it holds, too)" in statement
    assert f"{shown} by {plan.accountant.upper()}, the accountant of this plan" in str(plan)
    assert all(f" - epsilon: {e:.4f}" in output for e in history["epsilon"])
    # Not a step more.
    with pytest.raises(BudgetExhaustedError, match="target_epsilon=3.0"):
        x, y = make_data()
        model.fit(plan.dataset(x, y), callbacks=[plan.callback()], verbose=0)


def test_b16_statements_are_by_the_accountant_of_the_callback():
    sampling = CyclicPoissonSampling(1000, 20)
    mechanism = DiceMechanism(l2_norm_clip=1.0, noise_multiplier=2.0, expected_batch_size=20)
    for accountant in ACCOUNTANTS:
        epsilon = accounting.compute_epsilon(mechanism, sampling, 100, 1e-4, accountant)
        text = accounting.privacy_statement(mechanism, sampling, 100, 1e-4, accountant=accountant)
        assert f"epsilon = {accounting.epsilon.up(epsilon)} (" in " ".join(text.split())
        model = make_model()
        model.compile(dice_tf.DiceSGDOptimizer(
            l2_norm_clip=1.0, noise_multiplier=2.0, expected_batch_size=20), "mse")  # fmt: skip
        callback = dice_tf.EpsilonCallback(sampling, 1e-4, accountant=accountant)
        callback.set_model(model)
        assert f"{accountant.upper()} accountant: 0.000\n" in callback.statement()
    with pytest.raises(AccountingError, match="accountant='moments'"):
        accounting.privacy_statement(mechanism, sampling, 100, 1e-4, accountant="moments")


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize(
    "sizes, sampling, clips",
    [
        # 700 steps and more, 350 to 700, 200 to 350, below.
        ((60_000, 512, 7), CyclicPoissonSampling(60_000, 512, 8), (0.3, 0.7, 7)),
        ((60_000, 512, 4), CyclicPoissonSampling(60_000, 512, 4), (0.5, 0.5, 3)),
        ((5_000, 250, 10), CyclicPoissonSampling(5_000, 250, 2), (0.5, 0.5, 1)),
        ((5_000, 250, 3), PoissonSampling(5_000, 250), (1.0, 0.0, 1)),
    ],
)
def test_a_plan_is_the_layer_below_it(sizes, sampling, clips, accountant):
    num_examples, batch_size, epochs = sizes
    c1, c2, feedback_steps = clips
    plan = PrivacyPlan(
        num_examples=num_examples,
        batch_size=batch_size,
        epochs=epochs,
        target_epsilon=2.0,
        accountant=accountant,
    )
    assert (plan.sampling, plan.steps) == (sampling, sampling.steps(epochs))
    assert plan.delta == 0.1 / num_examples
    noise_multiplier = accounting.calibrate_noise_multiplier(
        2.0, plan.delta, sampling, plan.steps, c1, c2, True, feedback_steps, accountant
    )
    assert plan.noise_multiplier == pytest.approx(noise_multiplier, rel=2e-4)
    by_hand = DiceMechanism(
        l2_norm_clip=c1,
        error_norm_clip=c2,
        feedback_steps=feedback_steps,
        noise_multiplier=plan.noise_multiplier,
        expected_batch_size=batch_size,
    )
    epsilon = lambda steps: accounting.compute_epsilon(
        by_hand, sampling, steps, plan.delta, accountant
    )
    assert plan.epsilon() == pytest.approx(epsilon(plan.steps), rel=1e-9)
    assert 1.998 < plan.epsilon() <= 2.0
    assert plan.epsilon(plan.steps // 2) == pytest.approx(epsilon(plan.steps // 2), rel=1e-9)
    assert plan.epsilon(0) == 0
    # The other way round.
    other = PrivacyPlan(
        num_examples=num_examples,
        batch_size=batch_size,
        epochs=epochs,
        noise_multiplier=plan.noise_multiplier,
        accountant=accountant,
    )
    assert other.epsilon() == plan.epsilon() and other.target_epsilon is None
    assert other.callback().target_epsilon is None
    callback = plan.callback()
    assert callback.sampling is plan.sampling
    assert (callback.delta, callback.target_epsilon, callback.accountant) == (
        plan.delta, 2.0, accountant)  # fmt: skip


def test_optimizers_take_their_arguments_from_the_plan_and_save_them_spelled_out(tmp_path):
    plan = PrivacyPlan(
        num_examples=1000, batch_size=10, epochs=8, noise_multiplier=2.5, error_norm_clip_ratio=2.0
    )
    adagrad = dice_tf.make_dice_optimizer_class(keras.optimizers.Adagrad)
    for optimizer_class in (dice_tf.DiceSGDOptimizer, dice_tf.DiceAdamOptimizer, adagrad):
        optimizer = optimizer_class(l2_norm_clip=0.5, plan=plan)
        assert optimizer.mechanism == DiceMechanism(
            l2_norm_clip=0.5, error_norm_clip=1.0, noise_multiplier=2.5,
            expected_batch_size=10, feedback_steps=7)  # fmt: skip
        config = optimizer.get_config()
        assert "plan" not in config and config["noise_multiplier"] == 2.5
        assert optimizer_class.from_config(config).mechanism == optimizer.mechanism
    # What the plan says, said again, is no contradiction.
    again = {k: v for k, v in dataclasses.asdict(optimizer.mechanism).items() if k in config}
    assert adagrad(**again, plan=plan).mechanism == optimizer.mechanism
    # A file of the model serves the statement.
    model = make_model()
    model.compile(
        dice_tf.DiceSGDOptimizer(0.1, l2_norm_clip=0.5, plan=plan),
        "sparse_categorical_crossentropy",
    )
    x, y = make_data(1000)
    model.fit(plan.dataset(x, y), callbacks=[plan.callback()], verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert plan.statement(loaded) == plan.statement(model)
    assert f"after {plan.sampling.steps_per_epoch} steps" in plan.statement(loaded)
    # DP-SGD and automatic clipping.
    plan = dataclasses.replace(plan, feedback_steps=0, error_norm_clip_ratio=0)
    assert dice_tf.DiceSGDOptimizer(l2_norm_clip=0.5, plan=plan).error_norm_clip == 0
    optimizer = dice_tf.DiceSGDOptimizer(clipping="automatic", plan=plan)
    assert (optimizer.l2_norm_clip, optimizer.error_norm_clip) == (1.0, 0.0)


@pytest.mark.parametrize(
    "argument",
    [
        dict(noise_multiplier=2.0),
        dict(expected_batch_size=11),
        dict(error_norm_clip=0.1),
        dict(feedback_steps=1),
        dict(bound_residuals=False),
        dict(num_microbatches=5),
    ],
    ids=str,
)
def test_arguments_that_contradict_the_plan_are_refused_with_both_values(argument):
    plan = PrivacyPlan(
        num_examples=1000, batch_size=10, epochs=4, noise_multiplier=2.5, feedback_steps=3
    )
    ((name, value),) = argument.items()
    planned = getattr(plan.mechanism(0.5), name)
    with pytest.raises(MechanismError) as caught:
        dice_tf.DiceSGDOptimizer(l2_norm_clip=0.5, plan=plan, **argument)
    text = str(caught.value)
    assert f"{name}={value!r} (plan: {planned!r})" in text
    assert len(text.split()) < 60
    # "Leave it out".
    assert getattr(dice_tf.DiceSGDOptimizer(l2_norm_clip=0.5, plan=plan), name) == planned


def test_a_plan_that_is_none_and_a_missing_threshold_are_refused():
    plan = PrivacyPlan(num_examples=1000, batch_size=10, epochs=8, noise_multiplier=2.5)
    with pytest.raises(MechanismError, match="must be a `dice_tf.PrivacyPlan`.*plan='mine'"):
        dice_tf.DiceSGDOptimizer(l2_norm_clip=0.5, plan="mine")
    with pytest.raises(MechanismError, match="are missing.*Received: l2_norm_clip=None[.] "):
        dice_tf.DiceSGDOptimizer(plan=plan)
    with pytest.raises(MechanismError, match="l2_norm_clip"):
        dice_tf.DiceSGDOptimizer(l2_norm_clip=-1.0, plan=plan)
    with pytest.raises(MechanismError, match="error_norm_clip_ratio=1, or 0.*ratio=2.3333"):
        dice_tf.DiceSGDOptimizer(clipping="automatic", plan=plan)
    plan = dataclasses.replace(plan, error_norm_clip_ratio=1)
    optimizer = dice_tf.DiceSGDOptimizer(clipping="automatic", plan=plan)
    assert optimizer.error_norm_clip == 1.0 and optimizer.feedback_steps == 7


SIZES = dict(num_examples=1000, batch_size=100, epochs=2)


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        (SIZES, MechanismError, ["target_epsilon=None", "noise_multiplier=None"]),
        (
            dict(SIZES, target_epsilon=2.0, noise_multiplier=1.0),
            MechanismError,
            ["target_epsilon=2.0", "noise_multiplier=1.0"],
        ),
        (dict(epochs=2, noise_multiplier=1.0), MechanismError, ["num_examples=None", "sampling"]),
        (
            dict(SIZES, noise_multiplier=1.0, sampling=PoissonSampling(1000, 50)),
            MechanismError,
            ["batch_size=100", "expected_batch_size=50", "Leave `batch_size` out"],
        ),
        (
            dict(SIZES, noise_multiplier=1.0, sampling=PoissonSampling(999, 50)),
            MechanismError,
            ["num_examples=1000", "num_examples=999"],
        ),
        (dict(SIZES, noise_multiplier=1.0, sampling="poisson"), AccountingError, ["'poisson'"]),
        (
            dict(SIZES, noise_multiplier=1.0, batch_size=1001),
            SamplingError,
            ["batch_size=1001", "num_examples=1000"],
        ),
        (dict(SIZES, noise_multiplier=1.0, batch_size=1e2), SamplingError, ["batch_size=100.0"]),
        (
            dict(SIZES, noise_multiplier=1.0, feedback_steps=15),
            SamplingError,
            ["feedback_steps=15", "batch_size=100", "batches of 62 at most"],
        ),
        (
            dict(SIZES, noise_multiplier=1.0, feedback_steps=1, error_norm_clip_ratio=0),
            MechanismError,
            ["feedback_steps=1", "error_norm_clip_ratio=0"],
        ),
        (
            dict(SIZES, noise_multiplier=1.0, feedback_steps=0, error_norm_clip_ratio=1),
            MechanismError,
            ["feedback_steps=0", "error_norm_clip_ratio=1"],
        ),
        (dict(SIZES, noise_multiplier="two"), MechanismError, ["noise_multiplier='two'"]),
        (dict(SIZES, target_epsilon=-1.0), AccountingError, ["target_epsilon=-1.0"]),
        (dict(SIZES, target_epsilon="3"), AccountingError, ["target_epsilon='3'"]),
        (dict(SIZES, noise_multiplier=1.0, delta=1e-3), AccountingError, ["delta=0.001"]),
        (dict(SIZES, noise_multiplier=1.0, epochs=0), AccountingError, ["epochs=0"]),
        (
            dict(SIZES, noise_multiplier=1.0, accountant="moments"),
            AccountingError,
            ["accountant='moments'"],
        ),
    ],
)
def test_plans_that_contradict_themselves_are_refused(arguments, error, words):
    with pytest.raises(error) as caught:
        PrivacyPlan(**arguments)
    text = str(caught.value)
    assert isinstance(caught.value, DicePrivacyError) and len(text.split()) <= 60
    assert all(word in text for word in words), text


def test_what_the_refusal_of_too_many_groups_advises_works():
    arguments = dict(SIZES, noise_multiplier=1.0, feedback_steps=15)
    with pytest.raises(SamplingError) as caught:
        PrivacyPlan(**arguments)
    batch_size = int(re.search(r"batches of (\d+)", str(caught.value))[1])
    assert PrivacyPlan(**dict(arguments, batch_size=batch_size)).sampling.num_groups == 16
    del arguments["feedback_steps"]
    assert PrivacyPlan(**arguments).feedback_steps == 0


def test_plans_are_frozen_and_one_fact_can_be_replaced():
    plan = PrivacyPlan(num_examples=1000, batch_size=100, epochs=2, target_epsilon=2.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.epochs = 3
    longer = dataclasses.replace(plan, epochs=4, noise_multiplier=None)
    assert longer.noise_multiplier > plan.noise_multiplier and longer.sampling is plan.sampling
    assert longer.epsilon() <= 2.0
    assert dataclasses.replace(plan, noise_multiplier=None) == plan


def test_models_of_another_mechanism_are_refused_before_the_first_step_and_in_the_statement():
    x, y = make_data()
    plan = PrivacyPlan(num_examples=200, batch_size=20, epochs=1, noise_multiplier=1.0)
    model = make_model()
    optimizer = dice_tf.DiceSGDOptimizer(
        0.1, l2_norm_clip=0.25, noise_multiplier=1.5, error_norm_clip=0.0, expected_batch_size=20
    )
    model.compile(optimizer, "sparse_categorical_crossentropy")
    refused = r"does not follow this plan.*noise_multiplier=1.5 \(plan: 1.0\)\. Compile"
    with pytest.raises(MechanismError, match=refused):
        model.fit(plan.dataset(x, y), callbacks=[plan.callback()], verbose=0)
    assert int(optimizer.iterations) == 0
    with pytest.raises(MechanismError, match=refused):
        plan.statement(model)
    model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(PlainGradientsError, match="optimizer=SGD"):
        plan.statement(model)
    with pytest.raises(PlainGradientsError, match="optimizer"):
        model.fit(plan.dataset(x, y), callbacks=[plan.callback()], verbose=0)
    # The remedy; a seed is the optimizer's own affair, and the statement names it.
    model.compile(
        dice_tf.DiceSGDOptimizer(0.1, l2_norm_clip=0.25, plan=plan, noise_seed=1),
        "sparse_categorical_crossentropy",
    )
    model.fit(plan.dataset(x, y), callbacks=[plan.callback()], verbose=0)
    assert f"after {plan.steps} steps" in " ".join(plan.statement(model).split())
    assert "NOT secret" in plan.statement(model)


def test_steps_without_the_sampler_have_no_statement():
    x, y = make_data()
    plan = PrivacyPlan(num_examples=200, batch_size=20, epochs=1, noise_multiplier=1.0)
    model = make_model()
    model.compile(
        dice_tf.DiceSGDOptimizer(0.1, l2_norm_clip=0.25, plan=plan),
        "sparse_categorical_crossentropy",
    )
    model.train_on_batch(x[:20], y[:20])
    with pytest.raises(SamplingError, match="did not draw"):
        plan.statement(model)


def test_weights_of_examples_go_through():
    x, y = make_data()
    plan = PrivacyPlan(sampling=PoissonSampling(200, 20, seed=1), epochs=2, noise_multiplier=1.0)
    (_, _, weights), *_ = plan.dataset(x, y, np.full(200, 0.5))
    assert set(np.unique(weights)) == {0.0, 0.5}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
