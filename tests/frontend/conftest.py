"""What the import tests share: running a module, reading its operators, checking a pass."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax

from tvm_fusion.build import tir_pipeline


@pytest.fixture(scope="session")
def run_module() -> Callable[..., list[np.ndarray]]:
    """Return a function that compiles a module for the CPU with TVM and runs it; only NaN are handled our way."""

    def run(mod: tvm.IRModule, *arrays: np.ndarray) -> list[np.ndarray]:
        compiled = tvm.compile(mod, target="llvm", tir_pipeline=tir_pipeline.NAME)
        machine = relax.VirtualMachine(compiled, tvm.cpu())
        result = machine["main"](*[tvm.runtime.tensor(array) for array in arrays])
        return (
            [result.numpy()]
            if isinstance(result, tvm.runtime.Tensor)
            else [item.numpy() for item in result]
        )

    return run


@pytest.fixture(scope="session")
def operators() -> Callable[[tvm.IRModule], list[tuple[str, str]]]:
    """Return a function that lists (name, operator) of every binding of ``main``."""

    def listing(mod: tvm.IRModule) -> list[tuple[str, str]]:
        pairs = []
        for block in mod["main"].body.blocks:
            for binding in block.bindings:
                op = getattr(binding.value, "op", None)
                pairs.append((binding.var.name, op.name.removeprefix("relax.") if op else "get"))
        return pairs

    return listing


@pytest.fixture(scope="session")
def bound() -> Callable[..., tvm.IRModule]:
    """Return a function that binds parameters of a TVMScript module to arrays (scripts hold no tensor constants)."""

    def bind(mod: tvm.IRModule, **arrays: np.ndarray) -> tvm.IRModule:
        return relax.transform.BindParams(
            "main", {k: tvm.runtime.tensor(v) for k, v in arrays.items()}
        )(mod)

    return bind


@pytest.fixture(scope="session")
def check_pass() -> Callable[..., tvm.IRModule]:
    """Return a function that asserts pass(before) == after, that the pass is idempotent and leaves its input alone."""

    def check(
        transform: object, before: tvm.IRModule, after: tvm.IRModule | None = None
    ) -> tvm.IRModule:
        """``after=None`` means that the pass must not fire."""
        digest = tvm_ffi.structural_hash(before)
        result = transform(before)
        tvm.ir.assert_structural_equal(result, before if after is None else after)
        tvm.ir.assert_structural_equal(transform(result), result)
        assert tvm_ffi.structural_hash(before) == digest
        return result

    return check
