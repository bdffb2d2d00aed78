"""Loading a factor of a window's products: raw into registers first, as float32 when it is multiplied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm_ffi

from ....compat import ir, sym, tirx
from ....compat import script_builder as T
from ...analysis import dtype_bytes, nodes_of
from ..fast_math import NARROW, fast_math
from ..tensor_core.affine import flat_offset, steps_in, substitute
from ..tensor_core.evaluate import Views, integer, keep
from ..tensor_core.form import Iterator
from .device_code import load_global, widen
from .form import Strips

_WIDEST = 16


class Reads:
    """How a thread reads one factor.

    Parameters
    ----------
    value : PrimExpr
        The factor, of the form's axes and of the reduction.
    form : Strips
        The function.
    starts : mapping of Var to PrimExpr
        Where the thread's strip begins along each axis.
    reduced : sequence of Iterator
        The reduction.
    lane : tuple of (Iterator or None, int)
        The iterator of which a thread has neighbouring values, and how many.
    views : mapping
        The parameters.
    """

    def __init__(
        self,
        value: tirx.PrimExpr,
        form: Strips,
        starts: Mapping[tirx.Var, tirx.PrimExpr],
        reduced: Sequence[Iterator],
        lane: tuple[Iterator | None, int],
        views: Views,
    ) -> None:
        self.value, self.form, self.views = value, form, views
        self.lane, self.count = lane
        self.loads: list[ir.TensorLoad] = []
        for load in nodes_of(value, ir.TensorLoad):
            if not any(_equal(load, other) for other in self.loads):
                self.loads.append(load)
        self.steps = [steps_in(flat_offset(load)) for load in self.loads]
        zero = {iterator.var: integer(0) for iterator in reduced}
        self.bases = [
            keep(substitute(flat_offset(load), {**starts, **zero}), "offset") for load in self.loads
        ]
        self.plain = self._plain()

    def _plain(self) -> bool:
        """Whether the factor is what is read, in float32."""
        value = self.value
        if isinstance(value, tirx.Cast) and str(value.ty) == "float32":
            value = value.value
        return isinstance(value, ir.TensorLoad)

    @property
    def is_constant(self) -> bool:
        """Whether what is read is the same at every call."""
        return all(any(load.source.same_as(c) for c in self.form.constants) for load in self.loads)

    def load(
        self,
        moved: Mapping[tirx.Var, int],
        names: Mapping[tirx.Var, tirx.PrimExpr],
        valid: tirx.PrimExpr,
    ) -> list[tirx.Buffer]:
        """Load all that the factor reads at one position.

        Parameters
        ----------
        moved : mapping of Var to int
            How far from the strip's start along the axes.
        names : mapping of Var to PrimExpr
            Values of the reduction's iterators.
        valid : PrimExpr
            Whether to load; registers become zero where not.
        """
        found = []
        for load, steps, base in zip(self.loads, self.steps, self.bases, strict=True):
            shift: tirx.PrimExpr = integer(0)
            for axis, count in moved.items():
                shift = shift + integer(steps.get(axis.__chandle__(), 0) * count)
            for var, value in names.items():
                shift = shift + value * integer(steps.get(var.__chandle__(), 0))
            shift = sym.Analyzer().simplify(shift)
            found.append(self._fetch(load, steps, base + shift, valid))
        return found

    def _fetch(self, load: ir.TensorLoad, steps: Mapping[int, int], start, valid) -> tirx.Buffer:
        """Load neighbours along the lanes, as many at once as can be."""
        dtype = str(load.ty.dtype)
        size = dtype_bytes(dtype)
        view = self.views[load.source.__chandle__()].data
        count, step = self._lanes(steps)
        wide = dtype == "float32"
        each = count
        while each > 1 and (step != 1 or each * size > _WIDEST or not self._aligned(steps, each)):
            each //= 2
        if wide:
            registers = T.alloc_buffer((count,), "float32", scope="local")
        else:
            registers = T.alloc_buffer(
                (count if each == 1 else count // 2,), "uint32", scope="local"
            )
        for first in range(0, count, each):
            at = first if wide or each == 1 else first // 2
            T.evaluate(
                load_global(
                    each * size, registers.data, at, view, start + integer(first * step), valid
                )
            )
        return registers

    def _lanes(self, steps: Mapping[int, int]) -> tuple[int, int]:
        """Elements that are read for the lanes, and how far apart they are."""
        step = 0 if self.lane is None else steps.get(self.lane.var.__chandle__(), 0)
        return (self.count, step) if step else (1, 0)

    def _aligned(self, steps: Mapping[int, int], width: int) -> bool:
        """Whether a load of so many elements begins where it may, wherever the thread is."""
        own = self.lane.var.__chandle__()
        if self.lane.extent % width:
            return False
        return all(number % width == 0 for var, number in steps.items() if var != own)

    def values(self, loaded: Sequence[tirx.Buffer], valid: tirx.PrimExpr | None) -> tirx.Buffer:
        """The factor in float32, of one lane or of each, from what was loaded.

        ``valid`` says whether the position is no padding, where it may be some.
        """
        wide = [self._widened(*pair) for pair in zip(self.loads, self.steps, loaded, strict=True)]
        if self.plain:
            return wide[0]
        result = T.alloc_buffer((self.count,), "float32", scope="local")
        for number in range(self.count):

            def replace(node, visit, number=number):
                if not isinstance(node, ir.TensorLoad):
                    return None
                place = next(i for i, load in enumerate(self.loads) if _equal(load, node))
                lanes, _ = self._lanes(self.steps[place])
                return wide[place][number if lanes > 1 else 0]

            narrow = any(str(load.ty.dtype) in NARROW for load in self.loads)
            value = fast_math(self.value, narrow=narrow, replace=replace)
            if valid is not None and not isinstance(valid, tirx.IntImm):
                value = tirx.Select(valid, value, tirx.const(0, "float32"))
            T.buffer_store(result, value, [number])
        return result

    def _widened(self, load: ir.TensorLoad, steps, registers: tirx.Buffer) -> tirx.Buffer:
        dtype = str(load.ty.dtype)
        if dtype == "float32":
            return registers
        count, _ = self._lanes(steps)
        result = T.alloc_buffer((count,), "float32", scope="local")
        pairs = int(registers.shape[0]) * 2 == count
        if pairs:
            T.evaluate(widen(dtype, count, result.data, 0, registers.data, 0))
        else:
            for number in range(count):
                T.evaluate(widen(dtype, 1, result.data, number, registers.data, number))
        return result


def _equal(one: ir.TensorLoad, other: ir.TensorLoad) -> bool:
    return tvm_ffi.structural_equal(one, other, map_free_vars=False)
