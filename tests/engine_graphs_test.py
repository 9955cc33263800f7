# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the layer-wise engine must not add to a graph, because it costs time in every step."""

import keras
from keras import layers as L
import pytest
import tensorflow as tf

from dice_tf.engine import layerwise


def traced(model):
    """Returns the graph of the gradient sums."""
    model.compile(loss="mse")
    outputs = model.compute_output_shape((None, *model.input_shape[1:]))
    model._compile_loss.build(tf.zeros([2, *outputs[1:]]), tf.zeros([2, *outputs[1:]]))
    step = lambda x, y: layerwise.weighted_gradient_sums(
        model, x, y, None, lambda norms: (tf.ones_like(norms), None)
    )
    shapes = [(None, *model.input_shape[1:]), (None, *outputs[1:])]
    function = tf.function(step, autograph=False)
    return function.get_concrete_function(*map(tf.TensorSpec, shapes)).graph


def own_tanh(x):
    return keras.ops.tanh(x)


# With a function of a user's it is the loop of Keras.
@pytest.mark.parametrize("activation", ["tanh", own_tanh])
def test_loops_are_not_wrapped_for_gradients_of_gradients(activation):
    layer = L.LSTM(3, activation=activation)
    graph = traced(keras.Sequential([keras.Input((4, 3)), layer, L.Dense(2)]))
    assert any(op.type in ("While", "StatelessWhile") for op in graph.get_operations())
    names = [f.signature.name for f in graph.as_graph_def().library.function]
    assert not [name for name in names if "cflow_gradient_wrapper" in name]


def test_only_the_activation_reads_what_goes_into_it():
    model = keras.Sequential(
        [keras.Input((6, 6, 3)), L.Conv2D(4, 3, activation="relu"), L.Flatten(),
         L.Dense(5, activation="relu"), L.Dense(2)]
    )  # fmt: skip
    relus = [op for op in traced(model).get_operations() if op.type == "Relu"]
    assert len(relus) == 2
    for relu in relus:
        assert relu.inputs[0].consumers() == [relu]


def test_norms_of_small_layers_take_no_more_operations_for_more_layers():
    def diagonals(layers):
        stack = [L.Conv2D(24, 1 + n % 2, padding="same") for n in range(layers)]
        graph = traced(keras.Sequential([keras.Input((2, 2, 24)), *stack, L.Flatten(), L.Dense(2)]))
        return sum(op.type.startswith("MatrixDiagPart") for op in graph.get_operations())

    assert diagonals(2) == diagonals(7) == 2


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
