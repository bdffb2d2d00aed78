"""The frozen configuration of planning and lowering."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

#: Strategies that can be asked for, in the order in which proposals are made.
STRATEGIES: tuple[str, ...] = ("vertical", "horizontal", "cross", "compound")

#: What to do with branches of a join that do unequal amounts of work.
BALANCES: tuple[str, ...] = ("refuse", "pad", "warps")

#: What products of float32 operands are computed in: float32 itself, or TF32 where a GPU's tensor cores have it.
FLOAT32_PRODUCTS: tuple[str, ...] = ("float32", "tf32")

#: What a kernel does with a value between two of its operators that the model has in bfloat16: keep it in float32, or
#: round it where the model does.
NUMERICS: tuple[str, ...] = ("wide", "strict")

#: Model families whose preset can be asked for; ``auto`` reads the family from the graph.
PRESETS: tuple[str, ...] = ("auto", "small-cnn", "large-cnn", "transformer")


@dataclasses.dataclass(frozen=True)
class FusionConfig:
    """Options of ``plan``, ``compile`` and the passes.

    Parameters
    ----------
    strategies : tuple of str
        Strategies to propose groups with, a subset of ``STRATEGIES``.
    preset : str
        One of ``PRESETS``: the model family that shapes proposals, ties and the order of tuning.
    max_depth : int
        Largest number of working operators on one path of a vertical group.
    max_members : int
        Largest number of horizontal branches that stay apart in one kernel. 4 to 6 pay most; 12
        lost 8 % (given when the project began; ``benchmarks/members_curve.py`` measures it), so the
        default is 6. Branches of a linear sum collapse and do not count.
    max_operators : int
        Largest number of operators in one group; bounds compile time and parameter count.
    balance : str
        One of ``BALANCES``: what to do with the branches of a join whose work differs by more than
        ``max_work_ratio``. ``"refuse"`` leaves them apart; ``"pad"`` zero-pads the light branch's
        kernel to the heavy one's, which makes both one convolution; ``"warps"`` lets every warp
        of the block work on each branch in turn, so that the heavier one gets more warp time.
    max_work_ratio : float
        Largest ratio of the work of two branches of one join (given when the project
        began: do not fuse above 1:3).
    max_recompute : float
        Largest number of times that a value may be computed inside a group, on average.
    max_shared_memory : int or None
        Most bytes of shared memory that a block may need; None for the target's limit (the opt-in
        one for kernels that size it at launch).
    max_registers : int or None
        Most registers of a thread; None for the target's limit.
    min_occupancy : float
        Least share of a multiprocessor's threads that the registers and shared memory of a group
        must leave room for.
    max_build_seconds : float
        Longest predicted time for compiling one kernel.
    deny : tuple of str
        ``fnmatch`` patterns of operator types or source node names that must not be fused.
    float32_products : str
        One of ``FLOAT32_PRODUCTS``. ``"tf32"`` rounds the operands of float32 convolutions and matrix products to
        TF32 (float32's exponent, 10 bits of mantissa) where that makes them faster: on tensor cores, from sm_80 on.
        Sums stay in float32; convolutions become channels-last.
    numerics : str
        One of ``NUMERICS``. ``"wide"`` lets the values between the operators of one kernel keep float32's precision
        where the model has float16 or bfloat16; ``"strict"`` rounds them as the unfused model would.
    """

    strategies: tuple[str, ...] = STRATEGIES
    preset: str = "auto"
    max_depth: int = 64
    max_members: int = 6
    max_operators: int = 64
    balance: str = "refuse"
    max_work_ratio: float = 3.0
    max_recompute: float = 4.0
    max_shared_memory: int | None = None
    max_registers: int | None = None
    min_occupancy: float = 0.125
    max_build_seconds: float = 10.0
    deny: tuple[str, ...] = ()
    float32_products: str = "float32"
    numerics: str = "wide"

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategies", _as_tuple(self.strategies))
        object.__setattr__(self, "deny", _as_tuple(self.deny))
        if not self.strategies:
            raise ValueError(f"no strategy is given; choose from {', '.join(STRATEGIES)}")
        for name in self.strategies:
            _check_choice("strategy", name, STRATEGIES)
        _check_choice("balance", self.balance, BALANCES)
        _check_choice("preset", self.preset, PRESETS)
        _check_choice("float32_products", self.float32_products, FLOAT32_PRODUCTS)
        _check_choice("numerics", self.numerics, NUMERICS)
        for field in ("max_depth", "max_members", "max_operators"):
            _check_count(field, getattr(self, field))
        for field in ("max_shared_memory", "max_registers"):
            if getattr(self, field) is not None:
                _check_count(field, getattr(self, field))
        for field, least in (
            ("max_work_ratio", 1), ("max_recompute", 1), ("min_occupancy", 0), ("max_build_seconds", 0),
        ):  # fmt: skip
            _check_number(field, getattr(self, field), least)
        if self.min_occupancy > 1:
            raise ValueError(f"min_occupancy must be at most 1, got {self.min_occupancy!r}")


def _check_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"unknown {what} {value!r}; choose from {', '.join(choices)}")


def _check_count(field: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{field} must be a positive integer, got {value!r}")


def _check_number(field: str, value: object, least: float) -> None:
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not least <= value < math.inf  # NaN compares false
    ):
        raise ValueError(f"{field} must be a number of at least {least}, got {value!r}")


def _as_tuple(value: str | Iterable[str]) -> tuple[str, ...]:
    return (
        tuple(part.strip() for part in value.split(",") if part.strip())
        if isinstance(value, str)
        else tuple(value)
    )
