"""Tensor-core kernels on the CPU: values of a small matmul, and that each way to break it is caught."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from tvm_fusion.schedules.cuda.tensor_core.device_code import OPERAND_TYPES, call

from tvm_fusion.compat import IRBuilder, tirx
from tvm_fusion.compat import script_builder as T
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.cuda_emulation import cuda_source, emulate, launch_of

SM80 = parse_target("cuda:sm_80")
TILE = 32  # rows and columns of a block
PITCH = 64  # bytes of a line in shared memory: 32 elements of 2 bytes, 16 of 4
STAGE = 2 * TILE * PITCH  # lines of the left operand, then lines of the right one


@dataclasses.dataclass
class Matmul:
    """A kernel of 4 warps with two stages; ``fault`` breaks it."""

    rows: int = 64
    columns: int = 64
    depth: int = 128
    dtype: str = "float16"
    transposed: bool = False  # whether the right operand is [depth, columns]
    fault: str = ""

    @property
    def piece(self) -> int:
        """Elements of 16 bytes."""
        return 4 if self.dtype == "float32" else 8

    def func(self) -> tirx.PrimFunc:
        """The scheduled function."""
        right = (self.depth, self.columns) if self.transposed else (self.columns, self.depth)
        with IRBuilder() as builder, T.prim_func(s_tir=True):
            T.func_name("main")
            self.a = T.arg("a", T.buffer((self.rows, self.depth), self.dtype))
            self.b = T.arg("b", T.buffer(right, self.dtype))
            self.c = T.arg("c", T.buffer((self.rows, self.columns), "float32"))
            with T.launch_thread("blockIdx.y", -(-self.rows // TILE)) as y:
                with T.launch_thread("blockIdx.x", -(-self.columns // TILE)) as x:
                    with T.launch_thread("threadIdx.x", 128) as thread:
                        self._body(y * TILE, x * TILE, thread)
        return builder.get()

    def _body(self, row, column, thread) -> None:
        shared = T.alloc_buffer((2 * STAGE,), "uint8", scope="shared.dyn")
        sums = T.alloc_buffer((8,), "float32", scope="local")
        rows = T.alloc_buffer((4,), "uint32", scope="local")
        columns = T.alloc_buffer((4,), "uint32", scope="local")
        for number in range(8):
            T.buffer_store(sums, tirx.const(0, "float32"), [number])
        lane, warp = T.bind(thread % 32), T.bind(thread // 32)
        steps = -(-self.depth // (4 * self.piece))
        fault = self.fault
        self._issue(shared, row, column, thread, 0)
        for step in range(steps):
            if fault != "no wait":
                T.evaluate(call("tvmf_wait_1" if fault == "late wait" else "tvmf_wait_0"))
            if fault != "no barrier":
                T.evaluate(call("tvmf_barrier"))
            if step + 1 < steps:
                self._issue(shared, row, column, thread, step + 1)
            stage = (step + (fault == "wrong stage")) % 2 * STAGE
            for k in range(2):
                self._multiply(shared, sums, rows, columns, lane, warp, stage, k)
        for number in range(8):
            i = T.bind(row + warp // 2 * 16 + lane // 4 + number % 4 // 2 * 8)
            j = T.bind(column + warp % 2 * 16 + lane % 4 * 2 + number % 2 + number // 4 * 8)
            with T.If(tirx.all(i < self.rows, j < self.columns)), T.Then():
                T.buffer_store(self.c, sums[number], [i, j])

    def _issue(self, shared, row, column, thread, step: int) -> None:
        """Start copying one tile of both operands: each thread has a piece of each."""
        name, first = "tvmf_copy_async_16", step % 2 * STAGE
        if self.fault == "misaligned copy":
            first += 8
        if self.fault == "beyond the memory":
            first += STAGE
        line, k = thread // 4, step * 4 * self.piece + thread % 4 * self.piece
        i, j = row + line, column + line
        valid = tirx.all(i < self.rows, k < self.depth)
        if self.fault == "beyond the array":
            valid = tirx.const(True, "bool")
        offset = first + line * PITCH + thread % 4 * 16
        T.evaluate(call(name, shared.data, offset, self.a.data, i * self.depth + k, valid))
        if self.transposed:
            k, j = step * 4 * self.piece + line, column + thread % 4 * self.piece
            index = k * self.columns + j
        else:
            index = j * self.depth + k
        valid = tirx.all(j < self.columns, k < self.depth)
        T.evaluate(call(name, shared.data, offset + TILE * PITCH, self.b.data, index, valid))
        T.evaluate(call("tvmf_commit"))

    def _multiply(self, shared, sums, rows, columns, lane, warp, stage: int, k: int) -> None:
        """Multiply half a tile."""
        offset = stage + (warp // 2 * 16 + lane % 16) * PITCH + (2 * k + lane // 16) * 16
        if self.fault == "misaligned":
            offset = offset + 8
        load = call("tvmf_ldmatrix", rows.data, 0, shared.data, offset)
        if self.fault == "half a warp":
            with T.If(lane < 16), T.Then():
                T.evaluate(load)
        else:
            T.evaluate(load)
        first = stage + TILE * PITCH
        if self.transposed:
            offset = first + (k * 16 + lane % 16) * PITCH + (warp % 2 * 2 + lane // 16) * 16
            T.evaluate(call("tvmf_ldmatrix_trans", columns.data, 0, shared.data, offset))
        else:
            line = warp % 2 * 16 + lane // 16 * 8 + lane % 8
            offset = first + line * PITCH + (2 * k + lane // 8 % 2) * 16
            T.evaluate(call("tvmf_ldmatrix", columns.data, 0, shared.data, offset))
        name = f"tvmf_mma_{OPERAND_TYPES[self.dtype][0]}"
        past = 4 if self.fault == "fragment" else 0
        for n in range(2):
            T.evaluate(call(name, sums.data, 4 * n + past, rows.data, 0, columns.data, 2 * n))


def tf32(values: np.ndarray) -> np.ndarray:
    """float32 without its last 13 bits."""
    return (values.view("uint32") & np.uint32(0xFFFFE000)).view("float32")


def run(
    case: Matmul, backward: bool = False, check_races: bool = True, blocks: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Run a kernel: its result, what it has to be in float64, and what was written."""
    dtype = ml_dtypes.bfloat16 if case.dtype == "bfloat16" else case.dtype
    rng = np.random.default_rng(0)
    a = rng.standard_normal((case.rows, case.depth)).astype(dtype)
    b = rng.standard_normal((case.columns, case.depth)).astype(dtype)
    exact = tf32 if case.dtype == "float32" else lambda values: values
    expected = exact(a).astype("float64") @ exact(b).astype("float64").T
    right = np.ascontiguousarray(b.T) if case.transposed else b
    if case.dtype == "bfloat16":
        a, right = a.view("uint16"), right.view("uint16")
    result = np.full((case.rows, case.columns), np.nan, "float32")
    func = case.func()
    written = emulate(
        cuda_source(func, SM80),
        launch_of(func),
        {"a": a, "b": right, "c": result},
        backward=backward,
        check_races=check_races,
        blocks=blocks,
    )
    return result, expected, written["c"]


CASES = {
    "float16": Matmul(),
    "bfloat16": Matmul(dtype="bfloat16"),
    "tf32": Matmul(dtype="float32"),
    "transposed": Matmul(transposed=True),
    "transposed bfloat16": Matmul(transposed=True, dtype="bfloat16"),
    "tails": Matmul(rows=40, columns=56, depth=72),
    "transposed tails": Matmul(rows=33, columns=40, depth=88, transposed=True),
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values(case, backward):
    result, expected, written = run(case, backward)
    assert written.all()
    assert np.abs(result - expected).max() <= 2e-6 * np.abs(expected).max()


FAULTS = {
    "no barrier": "without a barrier|asynchronous copy",
    "no wait": "asynchronous copy",
    "late wait": "asynchronous copy",
    "wrong stage": "asynchronous copy",
    "misaligned": "ldmatrix: byte .*8 of dynamic shared memory is not aligned to 16 bytes",
    "misaligned copy": "cp.async: byte .*[08] of dynamic shared memory is not aligned to 16 bytes",
    "beyond the memory": "byte [0-9]+ of dynamic shared memory written, which is out of range",
    "half a warp": "different instructions|ldmatrix is not reached",
    "fragment": "operands of 16 bytes where their array has 0",
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_an_error(fault, backward):
    with pytest.raises(RuntimeError, match=FAULTS[fault]):
        run(Matmul(fault=fault), backward)


@pytest.mark.parametrize("fault", ["no barrier", "no wait", "late wait", "wrong stage"])
def test_without_the_check_of_races_values_are_wrong(fault):
    wrong = []
    for backward in (False, True):
        result, expected, _ = run(Matmul(fault=fault), backward, check_races=False)
        wrong.append(not np.allclose(result, expected, atol=1e-3))
    assert all(wrong)


def test_zeros_are_copied_without_reading():
    with pytest.raises(RuntimeError, match="a read out of range: byte 5760 of 5760"):
        run(Matmul(rows=40, columns=56, depth=72, fault="beyond the array"))


def test_a_sample_of_blocks():
    result, expected, written = run(Matmul(rows=128, columns=128), blocks=5)
    tiles = written.reshape(4, TILE, 4, TILE).all(axis=(1, 3))
    assert tiles.sum() == 5
    assert tiles[[0, 0, 3, 3], [0, 3, 0, 3]].all()
    assert written.sum() == 5 * TILE * TILE
    assert np.abs(result - expected)[written].max() <= 2e-6 * np.abs(expected).max()
    assert np.isnan(result[~written]).all()
