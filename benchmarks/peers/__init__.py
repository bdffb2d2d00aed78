"""The contenders: one framework a file. Each runs in a process of its own (``worker.py``)."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any


@dataclasses.dataclass(frozen=True)
class Contender:
    """What the tables call a contender, and where it is.

    Attributes
    ----------
    name : str
        Name in the results.
    module, factory : str
        Where its class is, and the class.
    options : dict
        Arguments of the class.
    kind : {"peer", "expert", "ours", "extra"}
        Peers compete as automatic compilers; ``extra`` is reported only.
    shards : int
        Processes that prepare its rows side by side.
    cpu : bool
        Whether it is worth running without a GPU.
    default : bool
        Whether it runs unless others are named.
    """

    name: str
    module: str
    factory: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    kind: str = "peer"
    shards: int = 1
    cpu: bool = False
    default: bool = True


def _inductor(name: str, shards: int = 1, **options: Any) -> Contender:
    return Contender(name, "torch_peer", "Compiled", {"settings": options}, shards=shards)


_COMBO = {"freezing": True, "combo_kernels": True}
_TUNED = {"freezing": True, "max_autotune": True, "coordinate_descent_tuning": True}

CONTENDERS: dict[str, Contender] = {
    c.name: c
    for c in (
        Contender("eager", "torch_peer", "Eager", cpu=True),
        _inductor("inductor"),
        _inductor("inductor_freeze", freezing=True),
        _inductor("inductor_freeze_combo", **_COMBO),
        _inductor("inductor_freeze_autotune", shards=4, **_TUNED),
        Contender("expert", "torch_peer", "Expert", kind="expert", cpu=True),
        Contender(
            "expert_compiled",
            "torch_peer",
            "CompiledExpert",
            {"settings": {"freezing": True}},
            kind="expert",
        ),
        Contender("jax", "jax_peer", "Jax", shards=2, cpu=True),
        Contender("tensorrt", "tensorrt_peer", "TensorRT"),
        Contender("tvm_default", "tvm_peer", "StockTVM"),
        Contender("tvm_tuned", "tvm_peer", "TunedTVM", shards=4, default=False),
        Contender("unfused", "ours", "Ours", {"fused": False}, kind="ours", shards=2, cpu=True),
        # The ladder of a block: what each kind of fusion adds.
        *(
            Contender(
                name,
                "ours",
                "Ours",
                {"fused": True, **options},
                kind="extra",
                shards=2,
                cpu=True,
                default=False,
            )
            for name, options in (
                ("ours_vertical", {"strategies": ("vertical",), "deny": ("softmax",)}),
                ("ours_attention", {"strategies": ("vertical",)}),
                ("ours_no_cross", {"strategies": ("vertical", "horizontal")}),
            )
        ),
        Contender("ours", "ours", "Ours", {"fused": True}, kind="ours", shards=2, cpu=True),
        *(
            Contender(
                name,
                "ours",
                "Ours",
                {"fused": True, "tuned": depth},
                kind=kind,
                shards=2,
                cpu=True,
                default=False,
            )
            for name, depth, kind in (
                ("ours_tuned", "depth", "ours"),
                ("ours_tuned_deepest", "deepest", "extra"),
            )
        ),
    )
}


def create(name: str, context: Any) -> Any:
    """Make a contender in this process.

    Raises
    ------
    ImportError
        If its framework is not installed.
    """
    contender = CONTENDERS[name]
    module = importlib.import_module(f"peers.{contender.module}")
    return getattr(module, contender.factory)(context, **contender.options)
