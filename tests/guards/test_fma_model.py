"""The model of float32 multiply-add kernels against kernels measured on an H200, and what it admits."""

from __future__ import annotations

import dataclasses

import pytest

from tvm_fusion.devices import DEVICES
from tvm_fusion.guards.fma_model import best_tiles, predict
from tvm_fusion.guards.fma_tiles import UNROLLED, WARP, Problem, Side

H200 = DEVICES["sm_90"]


def image(channels, positions, *depths, copies=1, width=1, taps=1):
    """A convolution with channels first."""
    sums = (copies,) * len(depths)
    return Problem(Side(channels, copies), Side(positions, 1, width, False, taps), 1, depths, sums)


def product(rows, columns, depth):
    """A matrix product."""
    return Problem(Side(rows, width=1, transposed=True), Side(columns), 1, (depth,), (1,))


#: Microseconds of the best of 13 to 17 tiles, with launches that overlap (benchmarks/NOTES.md).
MEASURED = {
    "convsum4": (image(64, 16384, 576), 28.7),
    "convrelusum4": (image(64, 16384, 576, copies=4), 97.3),
    "cbr1": (image(64, 3136, 576), 7.5),
    "cross31": (image(64, 3136, 576, 64), 8.7),
    "cross33": (image(64, 16384, 576, copies=2), 52.7),
    "qkv8": (product(512, 1536, 512), 21.0),
    "fc4": (product(32, 4096, 1024), 9.3),
    "dwpw": (image(64, 12544, 32, width=0, taps=9), 4.5),
    "4096": (product(4096, 4096, 4096), 2669),
    "7x7": (image(512, 49, 4608), 16.8),
    "prologue": (image(64, 3136, 576, width=0), 9.4),
}


@pytest.mark.parametrize("name", MEASURED)
def test_measured_kernels(name):
    problem, microseconds = MEASURED[name]
    assert best_tiles(problem, H200)[0].microseconds == pytest.approx(microseconds, rel=0.1)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("name", MEASURED)
def test_every_tile_can_be_launched(name, arch):
    """Registers, shared memory, threads and code of all that the search admits."""
    problem, _ = MEASURED[name]
    device = DEVICES[arch]
    for choice in best_tiles(problem, device, 10_000):
        tile = choice.tile
        sums = tile.thread_rows * tile.thread_columns
        registers = sums * sum(problem.sums) + 2 * (tile.thread_rows + tile.thread_columns)
        assert tile.shared_bytes(problem) <= device.shared_memory_per_block_optin
        assert registers * tile.threads < device.registers_per_multiprocessor
        assert WARP <= tile.threads <= device.max_threads_per_block
        assert sums * max(problem.sums) * tile.depth // tile.warp_depth <= UNROLLED


def test_fewer_lanes_take_longer():
    """A multiprocessor of an sm_80 multiplies half as many numbers a cycle, and its clock is slower."""
    problem = product(4096, 4096, 4096)
    slow = best_tiles(problem, DEVICES["sm_80"])[0].microseconds
    fast = best_tiles(problem, H200)[0].microseconds
    assert 3 * fast < slow < 4.5 * fast


def test_neighbours_that_are_copied_at_once_take_less_time():
    narrow, wide = image(64, 3136, 64), image(64, 3136, 64, width=4)
    tile = best_tiles(narrow, H200)[0].tile
    assert predict(wide, H200, tile) < predict(narrow, H200, tile)


def test_the_first_of_many_is_the_one_that_is_taken():
    problem = image(64, 3136, 576)
    (only,) = best_tiles(problem, H200)
    several = best_tiles(problem, H200, 5)
    assert several[0] == only
    assert [c.microseconds for c in several] == sorted(c.microseconds for c in several)
    assert predict(problem, H200, only.tile) == pytest.approx(only.microseconds)
    larger = dataclasses.replace(problem, depths=(1152,))
    assert best_tiles(larger, H200)[0].microseconds > only.microseconds
