"""The register of small Relay modules for tests, and what they are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..relay.compat import relay, tvm
from .relay_models import module

#: Makers of modules by the name of the case.
CASES: dict[str, Callable[[np.random.RandomState], tvm.IRModule]] = {}


def case(function: Callable[[np.random.RandomState], tvm.IRModule]) -> Callable[..., Any]:
    """Register the maker of a module under its own name."""
    CASES[function.__name__] = function
    return function


def feature_map(name: str = "x") -> Any:
    """A parameter of 2 x 8 maps of 6 x 6."""
    return relay.var(name, shape=(2, 8, 6, 6))


def matrices(name: str = "b") -> Any:
    """A parameter of two matrices of 5 x 8."""
    return relay.var(name, shape=(2, 5, 8))


def behind_relu(body: Any, *params: Any) -> tvm.IRModule:
    """A module that returns the ReLU of an expression."""
    return module(relay.nn.relu(body), *params)
