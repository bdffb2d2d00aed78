"""The form of attention: scores of queries and keys, softmax over the keys, sums of values.

``output[row, :] = sum over keys of softmax(score(query[row] . key[k])) * value[k, :]`` for each element of a batch; a
sink may add to a softmax's sum of exponentials.
Traffic: queries, keys, values and the output once; 4 FLOPs for each row, key and place of a head, and an exponential
for each row and key.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from ....compat import sym, tirx
from ..tensor_core.affine import substitute
from ..tensor_core.form import Iterator


@dataclasses.dataclass(frozen=True)
class Source:
    """An operand that is read as it is: rows of a sequence, of which each is contiguous.

    Attributes
    ----------
    buffer : Buffer
        A parameter.
    offset : PrimExpr
        Number of an element, of the batch's iterators, ``sequence`` and ``width``.
    sequence, width : Iterator
        What runs over the rows, and over the elements of one.
    """

    buffer: tirx.Buffer
    offset: tirx.PrimExpr
    sequence: Iterator
    width: Iterator


@dataclasses.dataclass(frozen=True)
class Limit:
    """A causal mask: keys up to ``row + shift`` take part.

    Attributes
    ----------
    shift : int
        How much further than its own position a row sees.
    """

    shift: int


@dataclasses.dataclass(frozen=True)
class Attention:
    """A function in the form of this file.

    Attributes
    ----------
    params : tuple of Buffer
        Parameters of the function.
    batch : tuple of Iterator
        Heads, examples: each has queries, keys and values of its own, or shares them.
    row, key : Iterator
        Queries and keys.
    query, keys, values : Source
        The operands; ``query.width`` and ``keys.width`` are the first product's reduction.
    scale : float
        What the first product's sum is multiplied by.
    sum : Var
        Stands for the scaled sum in ``score``.
    score : PrimExpr or None
        The softmax's argument, in float32; None where it is the scaled sum, or minus infinity where ``limit`` hides it.
    inside : PrimExpr or None
        The same where the causal mask hides nothing.
    limit : Limit or None
        The causal mask.
    zeroed : str
        Which rows become 0 instead of NaN: those of minus infinities alone (``"masked"``), those and all others whose
        softmax is NaN (``"undefined"``), those that ``hidden`` says (``"hidden"``), or none (empty).
    hidden : PrimExpr or None
        A truth value of the batch's iterators, the row and perhaps the key: rows for which it holds, at every key,
        become 0. Where it depends on the key, scores for which it holds are minus infinity or NaN.
    sink : PrimExpr or None
        A score, in float32, of the batch's iterators and the row, that takes part in the softmax and has no value.
    share : float
        What is added to a row's sum of ``exp(score - largest)``.
    sink_counts : bool
        Whether rows without any key are 0 beside a sink; else they are NaN.
    value_scale : float
        What the sums of values are multiplied by.
    mixed : Var
        Stands for the scaled sum of values in ``ending``.
    ending : PrimExpr or None
        What is stored, in float32, of the batch's iterators, the row and ``values.width``; None where that is the sum.
    output : Buffer
        The result.
    output_offset : PrimExpr
        Number of an element of it, of the batch's iterators, the row and ``values.width``.
    """

    params: tuple[tirx.Buffer, ...]
    batch: tuple[Iterator, ...]
    row: Iterator
    key: Iterator
    query: Source
    keys: Source
    values: Source
    scale: float
    sum: tirx.Var
    score: tirx.PrimExpr | None
    inside: tirx.PrimExpr | None
    limit: Limit | None
    zeroed: Literal["", "masked", "undefined", "hidden"]
    hidden: tirx.PrimExpr | None
    sink: tirx.PrimExpr | None
    share: float
    sink_counts: bool
    value_scale: float
    mixed: tirx.Var
    ending: tirx.PrimExpr | None
    output: tirx.Buffer
    output_offset: tirx.PrimExpr

    @property
    def dtype(self) -> str:
        """Type of the operands."""
        return str(self.query.buffer.dtype)

    @property
    def heads(self) -> int:
        """Elements of the batch."""
        return math.prod(i.extent for i in self.batch)


def is_row_wise(source: Source) -> bool:
    """Whether an operand's rows are contiguous, and they and their offsets of whole pieces of 16 bytes."""
    analyzer = sym.Analyzer()
    one = tirx.IntImm("int32", 1)
    piece = 16 // tirx_bytes(str(source.buffer.dtype))
    sequence, width = source.sequence.var, source.width.var
    steps = []
    for var in (sequence, width):
        step = analyzer.simplify(substitute(source.offset, {var: var + one}) - source.offset)
        if not isinstance(step, tirx.IntImm):
            return False
        steps.append(int(step))
    zero = tirx.IntImm("int32", 0)
    base = analyzer.simplify(substitute(source.offset, {sequence: zero, width: zero}))
    if steps[1] != 1 and source.width.extent > 1:
        return False
    if source.width.extent % piece or (source.sequence.extent > 1 and steps[0] % piece):
        return False
    found = analyzer.modular_set(base)
    return int(found.coeff) % piece == 0 and int(found.base) % piece == 0


def tirx_bytes(dtype: str) -> int:
    """Bytes of an element."""
    return 4 if dtype == "float32" else 2
