"""How wide vectors are on the target, and how to cut an extent into vectors."""

from __future__ import annotations

from ...compat import Target, tvm

#: Features in descending order of the float32 lanes that one register holds.
_REGISTERS = (("avx512f", 16), ("avx2", 8), ("avx", 8))

#: SSE2, NEON and VSX registers hold four float32 values; every 64-bit target of LLVM has at least these.
_BASE_LANES = 4


def lanes(target: Target) -> int:
    """Return the number of float32 values in a vector register.

    Plain ``llvm`` names no processor, so it gets the 4 lanes that each 64-bit processor has. Wider registers are used
    when the target's ``mcpu`` or ``mattr`` has them.

    Parameters
    ----------
    target : Target
        An ``llvm`` target.
    """
    for feature, width in _REGISTERS:
        if tvm.target.codegen.target_has_features(feature, target):
            return width
    return _BASE_LANES


def divisor(extent: int, at_most: int) -> int:
    """Return the largest divisor of ``extent`` that is at most ``at_most``."""
    return next(d for d in range(min(extent, at_most), 0, -1) if extent % d == 0)


def vector_tile(extent: int, width: int) -> int:
    """Return how many elements of an axis one register tile holds, in registers of ``width`` lanes.

    Two registers, or one where that computes fewer surplus elements at the end of the axis; a short axis is one tile.
    """
    if extent <= width:
        return extent
    return min(
        (2 * width, width),
        key=lambda tile: -(-extent // tile) * tile * (1.1 if tile == width else 1.0),
    )


def row_tile(extent: int, at_most: int = 8) -> int:
    """Return how many rows one register tile holds: a divisor where there is one, else what wastes least.

    Two vectors by 4 or 5 rows fill the 16 registers of a common processor; other sizes load more for each product, or
    spill.
    """
    if extent <= 4:
        return extent
    exact = [tile for tile in range(3, at_most + 1) if extent % tile == 0]

    def cost(tile: int) -> tuple[float, int]:
        return -(-extent // tile) * tile * (1.0 if tile in (4, 5) else 1.1), abs(tile - 4)

    return min(exact or range(3, at_most + 1), key=cost)
