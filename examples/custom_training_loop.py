# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""Private training in a loop of one's own: the step, epsilon, the budget, evaluation.

What it shows: `dice_tf.private_train_step` is the step that `fit` takes, as a function of
a model and a batch. All around it is plain Python: batches of a plan, epsilon after each
epoch, a stop before the step that would exceed the budget, and the statement of what was
guaranteed.

A plan can choose the noise so that a budget lasts for all epochs: `target_epsilon=` in place
of `noise_multiplier=`. Here it is the other way round, to show how a loop ends early.

    python examples/custom_training_loop.py
    python examples/custom_training_loop.py --epsilon=2 --noise_multiplier=6

The loop that one would write without privacy is refused. The gradient of a batch does not
bound what one example contributes, and noise cannot make up for that:

    with tf.GradientTape() as tape:
        loss = model.compute_loss(x, y, model(x))
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))

raises `dice_tf.errors.PlainGradientsError`, which names `private_train_step`.

What it needs: the extra `examples` of the package, no network (the digits of
scikit-learn). How long it takes on two cores: under half a minute, most of it starting
TensorFlow.
"""

from absl import app, flags, logging
import image_datasets
import image_models
import keras
import private_run
import tensorflow as tf

import dice_tf
from dice_tf import accounting


def make_plan(settings, num_examples):
    """Returns the `dice_tf.PrivacyPlan` of all epochs.

    Args:
        settings: Parsed flags.
        num_examples: Int, number of training images.
    """
    return dice_tf.PrivacyPlan(
        num_examples=num_examples,
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        noise_multiplier=settings.noise_multiplier,
        delta=settings.delta,
        accountant=settings.accountant,
        feedback_steps=1,
    )


def affordable_steps(plan, epsilon):
    """Returns how many steps of the plan a budget lasts for.

    Args:
        plan: `dice_tf.PrivacyPlan`.
        epsilon: Float, the budget.
    """
    steps = accounting.calibrate_steps(
        epsilon, plan.delta, plan.mechanism(), plan.sampling, accountant=plan.accountant
    )
    return min(steps, plan.steps)


def train(plan, steps, data, model):
    """Trains, and prints epsilon on the way.

    Args:
        plan: `dice_tf.PrivacyPlan`.
        steps: Int, at most those of the plan.
        data: `image_datasets.ImageData`.
        model: Compiled `keras.Model`.

    Returns:
        List of triples of each epoch: steps made so far, epsilon, test accuracy.
    """
    x, y = data.x_train, data.y_train
    batches = plan.dataset(x, y)
    # Once: compares the gradients of a few examples with those of each of them alone.
    dice_tf.check_gradients(model, (x[:8], y[:8]))

    # One signature, so that draws of another size trace no new graph.
    @tf.function(input_signature=[batches.element_spec])
    def step(batch):
        return dice_tf.private_train_step(model, batch)

    progress, made = [], 0
    for epoch in range(1, plan.epochs + 1):
        model.reset_metrics()
        for batch in batches.take(steps - made):
            logs = step(batch)
        # What was made, not what was planned: this number is what epsilon is about.
        made = int(model.optimizer.iterations)
        epsilon = dice_tf.run_epsilon(model, plan.sampling, plan.delta, plan.accountant)
        _, accuracy = model.evaluate(data.x_test, data.y_test, batch_size=512, verbose=0)
        progress.append((made, epsilon, accuracy))
        print(
            f"epoch {epoch}: {made} steps, loss {float(logs['loss']):.3f}, "
            f"test accuracy {accuracy:.4f}, epsilon {epsilon:.4f}",
            flush=True,
        )
        if made == steps:
            break
    return progress


def run(settings):
    """Loads the digits, trains and prints the statement.

    Args:
        settings: Parsed flags.

    Returns:
        As `train`.
    """
    data = image_datasets.load_images("digits", settings.data_dir)
    plan = make_plan(settings, len(data.x_train))
    steps = affordable_steps(plan, settings.epsilon)
    print(f"\n{plan}\n")
    print(f"--epsilon={settings.epsilon} lasts for {steps} of these {plan.steps} steps.")
    model = image_models.build_model("digits", data.x_train.shape[1:], data.num_classes)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = dice_tf.DiceSGDOptimizer(
        settings.learning_rate,
        momentum=settings.momentum,
        l2_norm_clip=settings.l2_norm_clip,
        plan=plan,
    )
    model.compile(optimizer, loss, metrics=["accuracy"])
    progress = train(plan, steps, data, model)

    if steps < plan.steps:
        print(f"Stopped: another round would exceed --epsilon={settings.epsilon}.")
    print(f"\n{plan.statement(model)}")
    return progress


def define_flags(flag_values):
    """Defines the flags of this script.

    Args:
        flag_values: `absl.flags.FlagValues` to define them in.
    """
    for name, define, default, text in (
        ("epsilon", flags.DEFINE_float, 3.5, "Privacy budget, at which the loop stops."),
        ("delta", flags.DEFINE_float, 1e-4, "Below 1 / number of training images."),
        ("noise_multiplier", flags.DEFINE_float, 4.0, "Noise on the sum, over l2_norm_clip."),
        ("l2_norm_clip", flags.DEFINE_float, 0.1, "Clipping threshold; also of the residuals."),
        ("batch_size", flags.DEFINE_integer, 256, "Expected batch size."),
        ("epochs", flags.DEFINE_integer, 20, "Number of epochs, if the budget lasts."),
        ("learning_rate", flags.DEFINE_float, 2.0, "Learning rate."),
        ("momentum", flags.DEFINE_float, 0.9, "Momentum."),
        ("data_dir", flags.DEFINE_string, None, "Folder of prepared TFDS data sets."),
    ):
        define(name, default, text, flag_values=flag_values)
    private_run.define_accountant(flag_values)


def main(argv):
    """Runs the script with the flags of the command line."""
    del argv
    logging.set_verbosity(logging.WARNING)
    run(flags.FLAGS)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
