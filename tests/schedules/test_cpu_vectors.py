"""Vector widths and tile sizes of the CPU templates."""

import pytest
from tvm_fusion.schedules.cpu.vectors import divisor, lanes, row_tile, vector_tile

from tvm_fusion.compat import Target


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ({"kind": "llvm"}, 4),
        ({"kind": "llvm", "mcpu": "core-avx2"}, 8),
        ({"kind": "llvm", "mcpu": "skylake-avx512"}, 16),
        ({"kind": "llvm", "mtriple": "aarch64-linux-gnu"}, 4),
    ],
)
def test_lanes(target, expected):
    assert lanes(Target(target)) == expected


def test_divisor():
    assert [divisor(extent, 16) for extent in (1, 7, 56, 55, 1000, 13, 17)] == [
        1,
        7,
        14,
        11,
        10,
        13,
        1,
    ]


@pytest.mark.parametrize(
    ("extent", "width", "expected"),
    [(3136, 8, 16), (49, 8, 8), (49, 4, 8), (7, 8, 7), (3, 4, 3), (1000, 16, 32), (17, 8, 8)],
)
def test_vector_tile(extent, width, expected):
    assert vector_tile(extent, width) == expected


@pytest.mark.parametrize(
    ("extent", "expected"),
    [(64, 4), (1, 1), (3, 3), (7, 7), (6, 3), (55, 5), (13, 5), (1000, 4), (197, 4)],
)
def test_row_tile(extent, expected):
    assert row_tile(extent) == expected
