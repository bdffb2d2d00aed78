"""Random Relay modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..relay.compat import relay, tvm
from .relay_models import constant, matrix, module, number


def random_module(seed: int) -> tvm.IRModule:
    """A random graph of operators, with types: shared values, several results, calls that are several operators."""
    chosen, random = np.random.RandomState(seed), np.random.RandomState(seed + 1)
    x, y = matrix("x"), matrix("y")
    values = [x, y]
    for _ in range(chosen.randint(6, 18)):
        # Recent values are likelier, so that chains form.
        a = values[-1 - chosen.randint(min(4, len(values)))]
        b = values[chosen.randint(len(values))]
        values.append(_OPERATIONS[chosen.randint(len(_OPERATIONS))](random, a, b))
    results = [values[2 + chosen.randint(len(values) - 2)] for _ in range(chosen.randint(1, 4))]
    return relay.transform.InferType()(module(relay.Tuple([*results, values[-1]]), x, y))


#: Operators on two matrices of 4 x 8 elements.
_OPERATIONS: tuple[Callable[[np.random.RandomState, Any, Any], Any], ...] = (
    lambda random, a, b: relay.tanh(a),
    lambda random, a, b: relay.add(a, b),
    lambda random, a, b: relay.multiply(a, b),
    lambda random, a, b: relay.nn.relu(a),
    lambda random, a, b: relay.subtract(number(1.0), a),
    lambda random, a, b: relay.multiply(a, number(0.5)),
    lambda random, a, b: relay.add(a, constant(random, 8)),
    lambda random, a, b: relay.nn.dense(a, constant(random, 8, 8)),
    lambda random, a, b: relay.nn.dense(a, relay.reshape(relay.concatenate([b, b], 0), (8, 8))),
    lambda random, a, b: relay.reshape(relay.reshape(a, (8, 4)), (4, 8)),
    lambda random, a, b: relay.transpose(relay.transpose(a)),
    lambda random, a, b: relay.split(relay.concatenate([a, b], 1), 2, 1)[1],
    lambda random, a, b: relay.nn.softmax(a),
    lambda random, a, b: relay.subtract(a, relay.mean(b, axis=1, keepdims=True)),
    lambda random, a, b: relay.power(relay.sigmoid(a), number(3.0)),
    lambda random, a, b: relay.take(relay.stack([a, b], 0), relay.const(1), axis=0),
    lambda random, a, b: relay.nn.l2_normalize(a, 1e-5, [1]),
)
