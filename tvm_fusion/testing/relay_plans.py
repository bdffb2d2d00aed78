"""Write Relay modules, and the plans that the Relay passes make of them, for a comparison elsewhere.

Runs in the environment with Relay: ``python -m tvm_fusion.testing.relay_plans FOLDER`` writes all cases.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from ..config import FusionConfig
from ..relay.compat import tvm
from ..relay.fuse import plan_with_graph
from .plan_digest import plan_digest
from .relay_cases import case_names, make_case
from .relay_random import random_module

#: Targets and configurations of the plans; JSON keeps them for the other side.
SETTINGS: tuple[tuple[str, dict[str, object]], ...] = (
    ("llvm", {}),
    ("cuda:sm_90a", {}),
    ("cuda:sm_80", {"balance": "pad", "strategies": ("vertical", "cross")}),
    ("cuda:sm_90a", {"strategies": ("horizontal",), "max_members": 2}),
    ("cuda:sm_90a", {"strategies": ("compound",)}),
)

#: Random modules beside the cases. In number 55 two groups save the same, and the names of operators differ here and
#: there.
RANDOM_SEEDS = (*range(20), 55)


def write_plans(folder: Path, name: str, mod: tvm.IRModule) -> None:
    """Write a module as ``NAME.json`` and its plans as ``NAME.plans``.

    Parameters
    ----------
    folder : Path
        Where to write.
    name : str
        What to call the files.
    mod : IRModule
        A Relay module.
    """
    (folder / f"{name}.json").write_text(tvm.ir.save_json(mod), encoding="utf-8")
    plans = []
    for target, options in SETTINGS:
        config = FusionConfig(**options)
        decided, graph = plan_with_graph(mod, target, config)
        plans.append({
            "target": target, "config": dataclasses.asdict(config), "digest": plan_digest(decided, graph),
        })  # fmt: skip
    (folder / f"{name}.plans").write_text(json.dumps(plans), encoding="utf-8")


if __name__ == "__main__":
    for case in case_names():
        write_plans(Path(sys.argv[1]), case, make_case(case))
    for seed in RANDOM_SEEDS:
        write_plans(Path(sys.argv[1]), f"random_{seed}", random_module(seed))
