"""Which tiles are chosen, and what their kernels take of a chip."""

from __future__ import annotations

import functools

import pytest
from tvm_fusion.schedules import schedule
from tvm_fusion.schedules.registry import spaces

from tvm_fusion.build.ptxas import kernel_resources
from tvm_fusion.devices import device_for
from tvm_fusion.guards.attention_tiles import (
    AttentionProblem,
    AttentionTile,
    best_attention_tiles,
    predict_attention,
)
from tvm_fusion.targets import parse_target
from tvm_fusion.testing import cuda_emulation
from tvm_fusion.testing.attention import (
    added,
    attention_function,
    causal,
    chosen_rows,
    gated,
    masked_rows,
    plain,
    scaled,
    sunk,
    undefined,
    zeroed,
)

PROBLEMS = {
    "bert128": AttentionProblem(12, 128, 128, 64, 64),
    "bert512": AttentionProblem(96, 512, 512, 64, 64),
    "long": AttentionProblem(128, 2048, 2048, 128, 128),
}


def device(arch: str):
    """A chip."""
    return device_for(parse_target(f"cuda:{arch}"))


def test_short_sequences_share_keys_and_long_ones_queries() -> None:
    short = best_attention_tiles(PROBLEMS["bert128"], device("sm_90"))[0].tile
    assert short.warp_keys > 1 and short.blocks(PROBLEMS["bert128"]) >= 48
    long = best_attention_tiles(PROBLEMS["long"], device("sm_90"))[0].tile
    assert long.rows >= 64


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_120"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_choices_fit_and_are_ranked(name: str, arch: str) -> None:
    problem, chip = PROBLEMS[name], device(arch)
    found = best_attention_tiles(problem, chip, 16)
    assert found
    assert [c.microseconds for c in found] == sorted(c.microseconds for c in found)
    for choice in found:
        assert choice.tile.shared_bytes(problem) <= chip.shared_memory_per_block_optin
        assert choice.microseconds == predict_attention(problem, chip, choice.tile)


def test_wide_heads_have_no_tile() -> None:
    assert not best_attention_tiles(AttentionProblem(8, 64, 64, 512, 512), device("sm_90"))


def test_more_keys_and_masks_take_longer() -> None:
    tile = AttentionTile(64, 1, 4, 1, 2)
    base = AttentionProblem(96, 512, 512, 64, 64)
    chip = device("sm_90")
    more = AttentionProblem(96, 512, 1024, 64, 64)
    scored = AttentionProblem(96, 512, 512, 64, 64, scored=True)
    half = AttentionProblem(96, 512, 512, 64, 64, causal=True)
    times = [predict_attention(p, chip, tile) for p in (half, base, scored, more)]
    assert times == sorted(times) and len(set(times)) == 4


def test_what_a_causal_mask_hides_costs_nothing() -> None:
    tile, chip = AttentionTile(64, 1, 4, 1, 2), device("sm_90")

    def time(rows: int, shift: int, causal: bool = True) -> float:
        return predict_attention(
            AttentionProblem(96, rows, 2048, 64, 64, causal, shift=shift), chip, tile
        )

    # New queries behind a cache see nearly all keys, those without one half of them.
    assert time(64, 1984) == pytest.approx(time(64, 0, causal=False), rel=0.05)
    assert time(64, 0) < time(64, 960) < time(64, 1984)


def test_the_search_space_is_the_tile() -> None:
    func = attention_function(plain, [(1, 2, 64, 64)] * 3)
    (space, *_) = spaces(func, parse_target("cuda:sm_90"), most=1)
    assert space.template == "attention"
    (point,) = space.points
    assert len(point.options) > 4 and len(point.microseconds) == len(point.options)


def test_not_before_sm_80_nor_in_float32() -> None:
    func = attention_function(plain, [(1, 2, 64, 64)] * 3)
    assert schedule(func, parse_target("cuda:sm_90"))[1] == "attention"
    assert schedule(func, parse_target("cuda:sm_75"))[1] != "attention"
    func = attention_function(plain, [(1, 2, 64, 64)] * 3, "float32")
    assert schedule(func, parse_target("cuda:sm_90"))[1] != "attention"


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        pytest.param(plain, [(1, 12, 128, 64)] * 3, id="bert128"),
        pytest.param(plain, [(8, 12, 512, 64)] * 3, id="bert512"),
        pytest.param(plain, [(8, 12, 500, 64)] * 3, id="tails"),
        pytest.param(plain, [(4, 32, 2048, 128)] * 3, id="long"),
        pytest.param(plain, [(4, 8, 1000, 256)] * 3, id="wide"),
        pytest.param(causal, [(4, 32, 2048, 128)] * 3, id="causal"),
        pytest.param(added, [*[(8, 12, 512, 64)] * 3, (8, 1, 512, 512)], id="mask"),
        pytest.param(added, [*[(4, 32, 500, 128)] * 3, (4, 1, 500, 500)], id="long mask"),
        pytest.param(masked_rows, [*[(8, 12, 512, 64)] * 3, (512, 512)], id="zeros by mask"),
        pytest.param(sunk, [*[(4, 32, 500, 128)] * 3, (1, 32, 1, 1)], id="sink"),
        pytest.param(gated, [(4, 32, 500, 128)] * 4, id="gate"),
        pytest.param(gated, [(1, 12, 128, 64)] * 4, id="short, gate"),
        pytest.param(sunk, [*[(1, 12, 128, 64)] * 3, (1, 12, 1, 1)], id="short, sink"),
    ],
)
def test_no_spills(make, shapes, arch: str) -> None:
    check_resources(make, shapes, arch)


def check_resources(make, shapes, arch: str, dtype: str = "float16") -> None:
    """Nothing is spilled."""
    target = parse_target(f"cuda:{arch}")
    made, name = schedule(attention_function(make, shapes, dtype), target)
    assert name == "attention"
    (used,) = kernel_resources(cuda_emulation.cuda_source(made, target), arch).values()
    assert used.spill_bytes == 0 and used.stack_bytes == 0


def of(length: int, width: int) -> list[tuple[int, ...]]:
    """Shapes of queries, keys and values."""
    return [(4, 32, length, width)] * 3


negative = functools.partial(scaled, scale=-0.125, values=2.0)

#: What is compiled for every arch: the function's maker and its shapes, by width.
FORMS = {
    "plain": (plain, lambda width: of(2048, width)),
    "short": (plain, lambda width: [(1, 12, 128, width)] * 3),
    "one query": (plain, lambda width: [(4, 32, 1, width), *of(2048, width)[1:]]),
    "tails": (plain, lambda width: of(501, width)),
    "causal": (causal, lambda width: of(1000, width)),
    "mask": (added, lambda width: [*of(512, width), (4, 1, 512, 512)]),
    "mask, tails": (added, lambda width: [*of(501, width), (4, 1, 501, 501)]),
    "zeros": (zeroed, lambda width: [*of(512, width), (4, 1, 512, 512)]),
    "zeros for NaN": (undefined, lambda width: [*of(512, width), (4, 1, 512, 512)]),
    "zeros by mask": (masked_rows, lambda width: [*of(512, width), (4, 1, 512, 512)]),
    "zeros by mask, tails": (masked_rows, lambda width: [*of(501, width), (4, 1, 501, 501)]),
    "chosen rows": (chosen_rows, lambda width: [*of(512, width), (4, 1, 512, 1)]),
    "sink": (sunk, lambda width: [*of(512, width), (1, 32, 1, 1)]),
    "sink, tails": (sunk, lambda width: [*of(501, width), (4, 1, 501, 1)]),
    "gate": (gated, lambda width: [*of(512, width), (4, 32, 512, width)]),
    "gate, tails": (gated, lambda width: [*of(501, width), (4, 32, 501, width)]),
    "sink of a number": (sunk, lambda width: of(501, width)),
    "negative": (negative, lambda width: of(501, width)),
}


@pytest.mark.nvcc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "width"),
    [
        *(("sm_90", width) for width in (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)),
        *((arch, width) for arch in ("sm_80", "sm_120") for width in (64, 80, 128, 256)),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_no_spills_of_any_width(form: str, arch: str, width: int) -> None:
    make, shapes = FORMS[form]
    check_resources(make, shapes(width), arch)


@pytest.mark.nvcc
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("arch", ["sm_86", "sm_89", "sm_90a", "sm_100"])
@pytest.mark.parametrize("form", ["short", "causal", "mask, tails"])
def test_no_spills_on_other_archs(form: str, arch: str, width: int, dtype: str) -> None:
    make, shapes = FORMS[form]
    check_resources(make, shapes(width), arch, dtype)
