# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""One measurement of JAX: plain SGD ("sgd"), or JAX-Privacy ("clipped_grad").

The models are those of Keras with the JAX backend, so all layers compute the same.
"""

import importlib
import importlib.metadata
import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import models
import protocol

# By name: these belong to an environment of their own and are no dependency of dice_tf.
jax = importlib.import_module("jax")
optax = importlib.import_module("optax")


def main():
    """Measures what the command line specifies."""
    cell = protocol.specification()
    batch = cell["batch"]
    model = models.build(keras, cell["model"])
    parameters = [variable.value for variable in model.trainable_variables]
    constants = [variable.value for variable in model.non_trainable_variables]

    def loss(parameters, x, y):
        logits, _ = model.stateless_call(parameters, constants, x, training=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    sgd = optax.sgd(1e-3)
    if cell["way"] == "sgd":
        noise_state = ()
        gradients = lambda parameters, x, y, state: (jax.grad(loss)(parameters, x, y), state)
    else:
        jax_privacy = importlib.import_module("jax_privacy")
        noise = importlib.import_module("jax_privacy.noise_addition")
        clipped = jax_privacy.clipped_grad(
            loss, l2_clip_norm=1.0, batch_argnums=(1, 2), normalize_by=batch
        )
        privatizer = noise.gaussian_privatizer(
            stddev=clipped.l2_norm_bound, prng_key=jax.random.key(0)
        )
        noise_state = privatizer.init(parameters)
        gradients = lambda parameters, x, y, state: privatizer.update(
            clipped(parameters, x, y), state
        )

    def step(parameters, optimizer_state, noise_state, x, y):
        direction, noise_state = gradients(parameters, x, y, noise_state)
        updates, optimizer_state = sgd.update(direction, optimizer_state, parameters)
        return optax.apply_updates(parameters, updates), optimizer_state, noise_state

    step = jax.jit(step, donate_argnums=(0, 1, 2))
    x, y = (jax.numpy.asarray(part) for part in protocol.make_examples(cell["model"], batch))
    state = [parameters, sgd.init(parameters), noise_state]

    def take(x, y):
        state[:] = step(*state, x, y)

    wait = lambda: jax.block_until_ready(state[0])
    result = protocol.time_alone(*protocol.loop_run(take, wait, x, y, batch), cell)
    names = ("jax", "jax-privacy", "keras")
    versions = {name: importlib.metadata.version(name) for name in names}
    protocol.report({**result, "versions": versions})


if __name__ == "__main__":
    main()
