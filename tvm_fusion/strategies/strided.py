"""Views of a tensor as steps in memory: which reshapes, transposes and broadcasts a kernel can read through."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

#: Extent and step in elements.
Factor = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class StridedView:
    """A tensor read through views.

    Attributes
    ----------
    dims : tuple of tuple of (int, int)
        Each dimension as extents and steps, the last running fastest: one that was flattened from several has several.
    offset : int
        Element that the view begins with.
    """

    dims: tuple[tuple[Factor, ...], ...]
    offset: int = 0

    @classmethod
    def of(cls, shape: Sequence[int]) -> StridedView:
        """A whole tensor of a shape."""
        dims, step = [], 1
        for extent in reversed(shape):
            dims.append(((extent, step),))
            step *= extent
        return cls(tuple(reversed(dims)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""
        return tuple(math.prod(e for e, _ in dim) for dim in self.dims)

    def permuted(self, axes: Sequence[int]) -> StridedView:
        """The view with its dimensions in another order."""
        return StridedView(tuple(self.dims[axis] for axis in axes), self.offset)

    def broadcast(self, shape: Sequence[int]) -> StridedView:
        """The view with dimensions in front, or of extent 1, repeated."""
        missing = len(shape) - len(self.dims)
        dims = (((1, 0),),) * missing + self.dims
        return StridedView(
            tuple(
                dim if math.prod(e for e, _ in dim) == extent else ((extent, 0),)
                for dim, extent in zip(dims, shape, strict=True)
            ),
            self.offset,
        )

    def sliced(self, axis: int, begin: int, extent: int) -> StridedView | None:
        """Some neighbouring places of a dimension; None where their steps differ."""
        step = self.step(axis)
        if step is None:
            return None
        dims = (*self.dims[:axis], ((extent, step),), *self.dims[axis + 1 :])
        return StridedView(dims, self.offset + begin * step)

    def reshaped(self, shape: Sequence[int]) -> StridedView | None:
        """The view with another shape; None where a new dimension begins within a step of an old one."""
        left = [f for dim in self.dims for f in dim if f[0] != 1][::-1]
        dims = []
        for extent in shape:
            taken: list[Factor] = []
            rest = extent
            while rest > 1:
                if not left:
                    return None
                size, step = left.pop()
                if rest % size == 0:
                    taken.append((size, step))
                    rest //= size
                elif size % rest == 0:
                    taken.append((rest, step * (size // rest)))
                    left.append((size // rest, step))
                    rest = 1
                else:
                    return None
            dims.append(_joined(taken))
        return StridedView(tuple(dims), self.offset) if not left else None

    def step(self, axis: int) -> int | None:
        """Elements from one place along a dimension to the next; None where that differs."""
        factors = self.dims[axis]
        return factors[0][1] if len(factors) == 1 else None


def _joined(factors: list[Factor]) -> tuple[Factor, ...]:
    """Factors, neighbours that run on into each other as one."""
    out: list[Factor] = []
    for size, step in factors:
        if out and out[-1][1] == size * step:
            out[-1] = (out[-1][0] * size, step)
        else:
            out.append((size, step))
    return tuple(out) or ((1, 0),)
