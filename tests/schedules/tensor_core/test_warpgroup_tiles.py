"""The search for warpgroup tiles: which are legal, in which order, and for which functions and chips."""

from __future__ import annotations

import dataclasses

import pytest
from tvm import relax
from tvm_fusion.schedules.base import MEMBER
from tvm_fusion.schedules.cuda.tensor_core.template import TensorCore

from tvm_fusion.devices import DEVICES
from tvm_fusion.guards import warpgroup_tiles as module
from tvm_fusion.guards.tensor_tiles import Problem, best_tiles
from tvm_fusion.guards.warpgroup_tiles import best_choices, warpgroup_tiles
from tvm_fusion.testing import cuda_emulation
from tvm_fusion.testing.modules import ModuleBuilder

op = relax.op

DEVICE = DEVICES["sm_90"]

PROBLEMS = {
    "convolution": Problem(3136, 64, 1, (576,), (1,), reduction_inner=True),
    "branches": Problem(16384, 64, 1, (576,), (4,), reduction_inner=True),
    "projections": Problem(512, 1536, 1, (512,), (1,), 64, reduction_inner=True),
    "separable": Problem(12544, 512, 1, (32,), (1,), 0, 512, 9, reduction_inner=True),
    "joined": Problem(784, 128, 1, (1152, 128), (1, 1), reduction_inner=True),
    "batched": Problem(128, 128, 12, (64,), (1,), reduction_inner=True),
    "few": Problem(17, 10, 1, (40,), (1,), reduction_inner=True),
    "odd parts": Problem(200, 60, 1, (64,), (1,), 20, reduction_inner=True),
}

#: More than there are.
ALL = 1000


def of_all(test):
    """Run a test on every problem."""
    return pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)(test)


# ---- what is legal ---------------------------------------------------------------------------------


@of_all
def test_tiles_keep_to_the_instruction_and_the_chip(problem):
    found = [choice.tile for choice in warpgroup_tiles(problem, DEVICE, ALL)]
    # No instruction multiplies 20 columns, and an output may end after any 20.
    assert bool(found) == (problem.part != 20)
    for tile in found:
        assert tile.warpgroup and tile.depth == 64 and tile.warp_depth == 1
        # 64 rows a warpgroup; 8 to 256 columns of it, in eights.
        assert tile.rows == 16 * tile.warp_rows and tile.warp_rows % 4 == 0
        share, rest = divmod(tile.columns, tile.warp_columns)
        assert rest == 0 and share % 8 == 0 and 8 <= share <= 256
        assert share // 2 * sum(problem.copies) <= 128
        assert tile.threads <= DEVICE.max_threads_per_block
        assert tile.shared_bytes(problem) <= DEVICE.shared_memory_per_block_optin
        assert tile.requested_bytes(problem, DEVICE) <= DEVICE.shared_memory_per_block_optin
        assert not problem.part or problem.part % share == 0
        assert tile.columns >= min(problem.least_columns, 256)
        # Not more than half of a tile is empty.
        assert tile.rows < 2 * max(problem.rows, 64) and tile.columns < 2 * max(problem.columns, 16)


@pytest.mark.parametrize(
    ("limit", "value", "of"),
    [
        ("max_threads_per_block", 128, lambda tile, _: tile.threads),
        ("shared_memory_per_block_optin", 64 * 1024, lambda tile, p: tile.shared_bytes(p)),
    ],
)
def test_a_smaller_chip_has_fewer_tiles(limit, value, of):
    problem = PROBLEMS["convolution"]
    assert max(of(c.tile, problem) for c in warpgroup_tiles(problem, DEVICE, ALL)) > value
    small = warpgroup_tiles(problem, dataclasses.replace(DEVICE, **{limit: value}), ALL)
    assert small and all(of(choice.tile, problem) <= value for choice in small)


@pytest.mark.parametrize(
    "changes",
    [
        {"reduction_inner": False},
        {"rows": 16},  # three quarters of an instruction would be idle
        {"copies": (17,)},  # 8 sums a lane for each of 17 branches, and the fewest columns are 16
        {"part": 12},  # no multiple of eight columns ends there
    ],
)
def test_functions_without_warpgroup_tiles(changes):
    problem = PROBLEMS["convolution"]
    assert warpgroup_tiles(dataclasses.replace(problem, rows=17, copies=(16,), part=64), DEVICE)
    other = dataclasses.replace(problem, **changes)
    assert not warpgroup_tiles(other, DEVICE)
    assert best_choices(other, DEVICE, 5) == best_tiles(other, DEVICE, 5)


@pytest.mark.parametrize("arch", sorted(set(DEVICES) - {"sm_90"}))
def test_other_chips_have_none(arch):
    device = DEVICES[arch]
    for problem in PROBLEMS.values():
        assert not warpgroup_tiles(problem, device)
        assert best_choices(problem, device, 3) == best_tiles(problem, device, 3)


# ---- the order -------------------------------------------------------------------------------------


@of_all
def test_the_order_is_that_of_the_times_and_always_the_same(problem, monkeypatch):
    found = warpgroup_tiles(problem, DEVICE, ALL)
    times = [choice.microseconds for choice in found]
    assert times == sorted(times) and all(time > 0 for time in times)
    assert len({choice.tile for choice in found}) == len(found)
    assert warpgroup_tiles(problem, DEVICE, 4) == found[:4]
    backwards = module.all_tiles()[::-1]
    monkeypatch.setattr(module, "all_tiles", lambda: backwards)
    assert warpgroup_tiles(problem, DEVICE, ALL) == found


def test_of_equal_times_the_smallest_tile_is_first(monkeypatch):
    monkeypatch.setattr(
        module, "microseconds_of", lambda problem, device, tiles, rates: 0 * tiles[0]
    )
    found = [choice.tile for choice in warpgroup_tiles(PROBLEMS["convolution"], DEVICE, ALL)]
    assert found == sorted(found) and len(found) > 1


@of_all
def test_the_better_instruction_is_chosen(problem):
    both = [*best_tiles(problem, DEVICE, 9), *warpgroup_tiles(problem, DEVICE, 9)]
    found = best_choices(problem, DEVICE, 9)
    assert set(found) <= set(both) and len(found) == 9
    others = [choice.microseconds for choice in set(both) - set(found)]
    assert found[-1].microseconds <= min(others, default=float("inf"))


def test_large_products_take_warpgroups_and_small_ones_do_not():
    large = Problem(4096, 4096, 1, (4096,), (1,), reduction_inner=True)
    assert best_choices(large, DEVICE)[0].tile.warpgroup
    assert not best_choices(PROBLEMS["few"], DEVICE)[0].tile.warpgroup


@of_all
@pytest.mark.parametrize("what", ["rows", "columns", "batch", "depths", "copies"])
def test_more_work_takes_no_less_time(problem, what):
    if problem.part == 20:
        return
    times = []
    for factor in (1, 2, 4, 8, 16, 4096):
        value = getattr(problem, what)
        value = tuple(factor * v for v in value) if isinstance(value, tuple) else factor * value
        found = warpgroup_tiles(dataclasses.replace(problem, **{what: value}), DEVICE)
        if found or what != "copies":  # so many sums may have no place
            times.append(found[0].microseconds)
    assert times == sorted(times)
    assert what == "copies" or times[-1] > 1.5 * times[0]


# ---- what the template makes of them ---------------------------------------------------------------


def product(emit, left, right):
    """A product with weights that can be packed."""
    return emit(op.matmul(left, right))


@pytest.fixture(scope="module")
def large(tensor):
    """A product that takes warpgroup instructions where it may."""
    return tensor.function(product, (512, 512), (512, 1536), constants=(1,))


@pytest.mark.parametrize(
    ("arch", "takes"),
    [("sm_80", False), ("sm_90", False), ("sm_90a", True), ("sm_100a", False), ("sm_120", False)],
)
def test_only_sm_90a_gets_the_instructions(tensor, large, arch, takes):
    source = cuda_emulation.cuda_source(tensor.scheduled(large, arch=arch), tensor.target(arch))
    assert ("wgmma.mma_async" in source) == takes
    assert ("mma.sync" in source) != takes


def test_a_member_of_a_kernel_does_not(tensor, large):
    member = large.func.with_attr(MEMBER, True)
    made = TensorCore().apply(member, tensor.target("sm_90a"))
    source = cuda_emulation.cuda_source(made, tensor.target("sm_90a"))
    assert "wgmma" not in source and "mma.sync" in source


def test_a_kernel_of_members_does_not(tensor):
    b = ModuleBuilder("float16")
    made = [b.dense(f"dense{i}", b.input(f"x{i}", (512, 512)), 1536) for i in range(2)]
    options = {"form": "partitioned", "join": "apart"}
    group = tensor.group(b.finish(*made), "horizontal", **options)
    scheduled = tensor.scheduled(group, "partitioned", arch="sm_90a")
    source = cuda_emulation.cuda_source(scheduled, tensor.target("sm_90a"))
    assert "wgmma" not in source and "mma.sync" in source
