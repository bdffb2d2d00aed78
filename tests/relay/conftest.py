"""The tests in ``inside`` run where TVM has Relay; ``test_with_relay`` runs them there."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def _has_relay() -> bool:
    spec = importlib.util.find_spec("tvm")
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    return any(Path(folder, "relay").is_dir() for folder in folders)


collect_ignore = [] if _has_relay() else ["inside"]
