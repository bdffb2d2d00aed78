"""Names of Relax's elementwise operators and their numpy equivalents."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

#: Binary operators with numpy broadcasting.
BINARY: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.true_divide,
    "power": np.power,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
}

#: Unary operators that constant folding evaluates.
UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "negative": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "exp": np.exp,
    "log": np.log,
    "square": np.square,
    "floor": np.floor,
    "ceil": np.ceil,
    "tanh": np.tanh,
    "cos": np.cos,
    "sin": np.sin,
    "sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)),
    "nn.relu": lambda x: np.maximum(x, 0),
    "isnan": np.isnan,
    "logical_not": np.logical_not,
    "bitwise_not": np.bitwise_not,
}
