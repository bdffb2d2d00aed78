"""Scores in registers become weights: masks, the largest of a row, exponentials, sums."""

from __future__ import annotations

import math

import tvm_ffi

from ....compat import ir, structural_equal, tirx
from ....compat import script_builder as T
from ....guards.tensor_tiles import ROWS
from ...analysis import nodes_of
from ..fast_math import to_type
from ..row_pieces import tree
from ..tensor_core.affine import flat_offset, substitute, uses
from ..tensor_core.evaluate import integer, load_elements
from .device_code import call

_LOG2_E = 1.4426950408889634

#: Below every finite score; TVM's softmax begins with it too.
_LOWEST = -3.4028234663852886e38


class Softmax:
    """Emits the softmax of a thread's scores.

    Parameters
    ----------
    body : Body
        The kernel: its place, its registers.
    """

    def __init__(self, body) -> None:
        self.body, self.form, self.tile = body, body.form, body.tile
        rows = 2 * self.tile.fragments
        self.most = T.alloc_buffer((rows,), "float32", scope="local")
        self.totals = T.alloc_buffer((rows,), "float32", scope="local")
        self.newest = T.alloc_buffer((rows,), "float32", scope="local")
        self.shrink = T.alloc_buffer((rows,), "float32", scope="local")
        self.is_plain = self.form.score is None
        #: What a score is multiplied by before the exponential to base 2.
        self.factor = _LOG2_E * (self.form.scale if self.is_plain else 1.0)
        self.fragments = self.tile.own_keys // 8

    @property
    def lowest(self) -> float:
        """The largest score of no keys; a multiple of it by ``factor`` must be a number."""
        return _LOWEST / 4 / max(1.0, self.factor) if self.is_plain else _LOWEST

    def begin(self) -> None:
        """Emit what stands before the tiles."""
        for number in range(2 * self.tile.fragments):
            T.buffer_store(self.most, tirx.const(self.lowest, "float32"), [number])
        first = self.body.first_row + self.body.warp_row * integer(ROWS * self.tile.fragments)
        first = first + self.body.lane // integer(4)
        self.rows = [T.bind(first + integer(8 * half)) for half in range(2 * self.tile.fragments)]

    def power(self, value, most) -> tirx.PrimExpr:
        """``exp(value - most)``, in units of the scores that registers hold."""
        factor = tirx.const(self.factor, "float32")
        if self.is_plain:
            return call("tvmf_exp2", value * factor - most * factor, result="float32")
        # Masks may be the lowest number: its multiple would be no number.
        return call("tvmf_exp2", (value - most) * factor, result="float32")

    # -- one tile ----------------------------------------------------------------------------------------

    def compare(self, step, edge: bool) -> None:
        """Emit the scores of one tile and their largest, and scale down what was added before."""
        first = (
            step * integer(self.tile.keys)
            if not isinstance(step, int)
            else integer(step * self.tile.keys)
        )
        first = first + self.body.warp_key * integer(self.tile.own_keys)
        first = T.bind(first + self.body.lane % integer(4) * integer(2))
        if self.is_plain:
            if edge:
                self._hide(first)
        else:
            self._evaluate(first, edge)
        self._largest()
        self._scale_down()

    def _index(self, half: int, fragment: int, number: int) -> int:
        """Register of a score: of a row, a fragment of eight keys, one of two neighbours."""
        return 4 * (half // 2 * self.fragments + fragment) + 2 * (half % 2) + number

    def _bounds(self, first) -> list:
        """For each row, up to which key from the lane's first one scores count."""
        form, found = self.form, []
        for row in self.rows:
            last = integer(form.key.extent - 1)
            if form.limit is not None:
                last = tirx.min(row + integer(form.limit.shift), last)
            found.append(T.bind(last - first))
        return found if form.limit is not None else found[:1] * len(self.rows)

    def _hide(self, first) -> None:
        """Let scores behind the end, or hidden by the causal mask, be minus infinity."""
        bounds = self._bounds(first)
        for half, bound in enumerate(bounds):
            for fragment in range(self.fragments):
                for number in range(2):
                    at = self._index(half, fragment, number)
                    inside = integer(8 * fragment + number) <= bound
                    T.buffer_store(
                        self.body.scores,
                        tirx.Select(inside, self.body.scores[at], _infinite()),
                        [at],
                    )

    # -- scores that are expressions ---------------------------------------------------------------------

    def _evaluate(self, first, edge: bool) -> None:
        form = self.form
        value = form.score if edge else form.inside
        ragged = edge and form.key.extent % self.tile.keys != 0
        loaded: list[tuple] = []
        for half, row in enumerate(self.rows):
            if form.row.extent % self.tile.rows:
                row = tirx.min(row, integer(form.row.extent - 1))
            for fragment in range(self.fragments):
                base = first + integer(8 * fragment)
                for number in range(2):
                    key = base + integer(number)
                    at = self._index(half, fragment, number)
                    found = self._score(
                        value, at, (half, fragment, number), row, base, ragged, loaded
                    )
                    if ragged:
                        found = tirx.Select(key < integer(form.key.extent), found, _infinite())
                    T.buffer_store(self.body.scores, found, [at])

    def _score(self, value, at: int, where: tuple, row, base, ragged: bool, loaded: list):
        """A score at one place."""
        form, (half, fragment, number) = self.form, where
        key = base + integer(number)
        if ragged:
            key = tirx.min(key, integer(form.key.extent - 1))
        swapped = {}
        for load in nodes_of(value, ir.TensorLoad):
            swapped[load.__chandle__()] = self._param(
                load, half, fragment, number, row, base, key, ragged, loaded
            )
        made = tvm_ffi.structural_map(
            value, [(ir.TensorLoad, lambda x: swapped[x.__chandle__()])], order="pre"
        )
        total = self.body.scores[at]
        if form.scale != 1.0:
            total = total * tirx.const(form.scale, "float32")
        names = {form.row.var: row, form.key.var: key, form.sum: total, **self.body.batch}
        return to_type(substitute(made, names), "float32")

    def _param(self, load, half, fragment, number, row, base, key, ragged, loaded):
        """A parameter's element, loaded once for all rows, or keys, that share it."""
        form = self.form
        offset = flat_offset(load)
        of_row, of_key = uses(offset, form.row.var), uses(offset, form.key.var)
        place = (
            half if of_row else None,
            fragment if of_key else None,
            number if ragged and of_key else None,
        )
        for seen, where, get in loaded:
            if where == place and structural_equal(seen, load, map_free_vars=False):
                return get(0 if ragged else number)
        names = {form.row.var: row, **self.body.batch}
        start, width = (key, 1) if ragged else (base, 2)
        get = load_elements(load, form.key.var, start, width, names, self.body.views, ())
        loaded.append((load, place, get))
        return get(0 if ragged else number)

    # -- the softmax -------------------------------------------------------------------------------------

    def _largest(self) -> None:
        scores = self.body.scores
        for half in range(len(self.rows)):
            values = [
                scores[self._index(half, fragment, number)]
                for fragment in range(self.fragments)
                for number in range(2)
            ]
            T.buffer_store(self.newest, tree(tirx.Max, values), [half])
            for bits in (1, 2):
                other = call("tvmf_shuffle_xor", self.newest[half], integer(bits), result="float32")
                T.buffer_store(self.newest, tirx.Max(self.newest[half], other), [half])
            T.buffer_store(self.newest, tirx.Max(self.newest[half], self.most[half]), [half])

    def _scale_down(self) -> None:
        body, count = self.body, 2 * self.body.value_parts
        for half in range(len(self.rows)):
            T.buffer_store(self.shrink, self.power(self.most[half], self.newest[half]), [half])
            T.buffer_store(self.most, self.newest[half], [half])
            T.buffer_store(self.totals, self.totals[half] * self.shrink[half], [half])
        for half in range(len(self.rows)):
            for column in range(count):
                for number in range(2):
                    at = 4 * (half // 2 * count + column) + 2 * (half % 2) + number
                    T.buffer_store(body.sums, body.sums[at] * self.shrink[half], [at])

    def weigh(self, group: int) -> None:
        """Emit the weights of 16 keys, as a row operand of the second product, and add them up."""
        body, groups = self.body, self.tile.own_keys // 16
        for half in range(len(self.rows)):
            places = []
            for fragment in (2 * group, 2 * group + 1):
                for number in range(2):
                    at = self._index(half, fragment, number)
                    places.append(at)
                    value = self.power(body.scores[at], self.most[half])
                    T.buffer_store(body.scores, value, [at])
                target = 4 * (half // 2 * groups + group) + 2 * (fragment % 2) + half % 2
                pair = self._index(half, fragment, 0)
                name = f"tvmf_pack_{body.type}"
                T.evaluate(call(name, body.weights.data, target, body.scores.data, pair))
            total = tree(tirx.Add, [body.scores[at] for at in places])
            T.buffer_store(self.totals, self.totals[half] + total, [half])


def _infinite() -> tirx.PrimExpr:
    return tirx.FloatImm("float32", -math.inf)
