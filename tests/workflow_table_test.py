# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""A table with numbers, strings and a rare class, from raw columns to a released model.

As docs/your_data_on_disk.md has it: a dictionary of columns, a FeatureSpace adapted on public
values, class weights, AUC on held-out rows, and the statement.
"""

import keras
import numpy as np
import pytest
from sklearn import metrics
import tensorflow as tf

import dice_tf
from dice_tf import accounting
from dice_tf.ledger import provenance

N, B, EPOCHS, DELTA = 2000, 200, 8, 5e-5
CITIES = ["Bonn", "Oslo", "Rome"]
PUBLIC = {"age": [0.0] * 3, "city": CITIES, "visits": [0, 5, 9]}


def columns_and_target():
    """Returns 2,400 rows; about one in six is positive, most of them old and from Rome."""
    rng = np.random.default_rng(0)
    rows = N + 400
    columns = {
        "age": rng.integers(18, 90, rows),
        "city": np.asarray([*CITIES, "Lima"])[rng.integers(4, size=rows)],
        "visits": rng.integers(0, 10, rows),
    }
    score = (columns["age"] - 60) / 10 + 2.0 * (columns["city"] == "Rome") + rng.normal(0, 1, rows)
    return columns, (score > 2.0).astype("int32")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    keras.utils.set_random_seed(0)
    columns, target = columns_and_target()
    train = {name: column[:N] for name, column in columns.items()}, target[:N]
    held_out = {name: column[N:] for name, column in columns.items()}, target[N:]

    space = keras.utils.FeatureSpace(
        features={
            "age": keras.utils.FeatureSpace.float_rescaled(scale=0.01),
            "city": keras.utils.FeatureSpace.string_categorical(),
            "visits": keras.utils.FeatureSpace.integer_categorical(num_oov_indices=1),
        },
        output_mode="concat",
    )
    space.adapt(tf.data.Dataset.from_tensor_slices(PUBLIC))

    sampling = dice_tf.CyclicPoissonSampling(num_examples=N, expected_batch_size=B, seed=0)
    noise_multiplier = accounting.calibrate_noise_multiplier(
        target_epsilon=3.0, delta=DELTA, sampling=sampling, steps=sampling.steps(EPOCHS)
    )
    data = sampling.dataset(*train, planned_epochs=EPOCHS).map(lambda x, y, w: (space(x), y, w))
    model = keras.Sequential([
        keras.Input(data.element_spec[0].shape[1:]),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.Dense(1, activation="sigmoid"),
    ])  # fmt: skip
    dice_tf.check_model(model)
    model.compile(
        dice_tf.DiceSGDOptimizer(
            0.5, momentum=0.9, l2_norm_clip=0.5, noise_multiplier=noise_multiplier,
            expected_batch_size=B, noise_seed=0,
        ),
        "binary_crossentropy",
        metrics=[keras.metrics.AUC(name="auc")],
    )  # fmt: skip
    budget = dice_tf.EpsilonCallback(sampling, delta=DELTA, target_epsilon=3.0)
    history = model.fit(
        data, epochs=EPOCHS, class_weight={0: 1.0, 1: 4.0}, callbacks=[budget], verbose=0,
        validation_data=(space(held_out[0]), held_out[1]),
    )  # fmt: skip
    path = tmp_path_factory.mktemp("released") / "model.keras"
    model.save(path)
    return dict(locals())


def test_it_learns_a_rare_class_within_the_budget(run):
    history = run["history"].history
    assert len(history["val_auc"]) == EPOCHS
    assert history["val_auc"][-1] > 0.85, history["val_auc"]
    assert 2.8 < run["budget"].epsilon() <= 3.0
    assert run["budget"].accounted_steps() == run["sampling"].steps(EPOCHS)
    assert "not cover" in run["budget"].statement()


def test_auc_while_training_leaves_padding_out(run):
    x, y, w = next(iter(run["data"]))
    drawn = w.numpy() > 0
    assert 0 < drawn.sum() < len(drawn)
    model = keras.models.load_model(run["path"])
    scores = model.predict(x, verbose=0)[:, 0]
    logs = dice_tf.private_train_step(model, (x, y, w))
    of_drawn = metrics.roc_auc_score(y.numpy()[drawn], scores[drawn])
    # Keras' AUC has 200 thresholds.
    assert float(logs["auc"]) == pytest.approx(of_drawn, abs=0.01)


def test_features_are_those_of_the_public_values(run):
    x, y, w = next(iter(run["data"]))
    assert int(provenance.count_marks(w)) == 1
    # One number, three cities and another, three counts and another.
    ages, cities, visits = np.split(x.numpy(), [1, 5], axis=1)
    assert 0.17 < ages.min() and ages.max() < 0.91 and visits.shape[1] == 4
    np.testing.assert_array_equal(cities.sum(axis=1), 1)
    np.testing.assert_array_equal(visits.sum(axis=1), 1)
    # "Lima" is not public: it is any other.
    others = run["space"]({"age": [50], "city": ["Lima"], "visits": [3]})
    unknown = run["space"]({"age": [50], "city": ["a city that nobody has"], "visits": [4]})
    np.testing.assert_array_equal(others, unknown)


def test_the_released_model_is_whole_and_has_no_error_in_it(run):
    loaded = keras.models.load_model(run["path"])
    x, _, _ = next(iter(run["data"]))
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), run["model"].predict(x, verbose=0))
    assert all(not np.any(error) for error in loaded.optimizer.errors)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
