# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""What a model or a loss would store while it is called, found by tracing the call.

Keras variables are caught by the scope that they are assigned in, whoever owns them.
Variables and tables of TensorFlow leave operations in the graph, in it or in the
functions that it calls.
"""

import re

import keras
import tensorflow as tf

# Operations that change a variable, a table, a queue or the like; `ScatterNd` and
# `TensorScatter...` make new tensors.
_CHANGES_STATE = re.compile(
    "Assign|^Resource.*(Scatter|Apply)"
    "|^Scatter(Add|Sub|Mul|Div|Min|Max|Update|NdAdd|NdSub|NdUpdate)$"
    "|^(Lookup|Mutable|Dense).*(Insert|Import|Remove)"
    "|^(Queue|Stack|Barrier).*(Enqueue|Dequeue|Push|Pop|Insert|Take)|^(Ordered)?(Map)?(Uns|S)tage$"
)


class Assignments(keras.StatelessScope):
    """Scope for one symbolic call, in a graph of its own, that assigns nothing and takes notes."""

    def __init__(self):
        super().__init__(collect_losses=True)
        self._assigned = []

    def __enter__(self):
        self._graph = tf.compat.v1.get_default_graph()
        return super().__enter__()

    def add_update(self, update):
        """Notes an assignment to a Keras variable; Keras calls this."""
        self._assigned.append(update[0])
        super().add_update(update)

    def names(self, allowed=()):
        """Returns the paths of Keras variables and the names of operations that would assign.

        Args:
            allowed: Keras variables to leave out, as random seeds are.
        """
        ids = set(map(id, allowed))
        paths = {v.path for v in self._assigned if id(v) not in ids and not _is_seed(v)}
        graph = self._graph.as_graph_def()
        nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
        return sorted(paths | {node.name for node in nodes if _CHANGES_STATE.search(node.op)})


def _is_seed(variable):
    return variable.path.endswith("seed_generator_state") and tuple(variable.shape) == (2,)
