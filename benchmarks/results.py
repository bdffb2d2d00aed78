"""The results file: one JSON, rewritten after every row."""

from __future__ import annotations

import copy
import datetime
import json
import math
import os
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers import CONTENDERS
from rows import KNOWN_RATES, ROWS

#: Prefix of each kind of time in a row's keys, and its name in a worker's answer.
CLOCKS = {"": "warm", "cold_": "cold", "call_": "call"}

Rounds = Mapping[str, Sequence[Mapping[str, float | None]]]


def commit_of(given: str | None) -> str:
    """The measured commit: what was given, ``$COMMIT``, or git's HEAD with a mark if it was edited."""
    if given or os.environ.get("COMMIT"):
        return given or os.environ["COMMIT"]
    folder = str(Path(__file__).resolve().parent)

    def git(*words: str) -> str:
        try:
            done = subprocess.run(
                ["git", "-C", folder, *words], capture_output=True, text=True, check=False
            )
        except OSError:
            return ""
        return done.stdout.strip()

    head = git("rev-parse", "--short", "HEAD")
    return head + ("-dirty" if head and git("status", "--porcelain", "-uno") else "")


def driver_version() -> str:
    """The NVIDIA driver's version, or an empty text."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else ""


def new_results(device: str, commit: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """An empty results file."""
    return {
        "device": device,
        "driver": driver_version() if device != "CPU" else "",
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "versions": {},
        "protocol": dict(settings),
        "ceilings": {},
        "empty_kernel_us": {},
        "cold_empty_kernel_us": {},
        "call_empty_kernel_us": {},
        "rows": [],
    }


def read_results(path: Path, device: str, commit: str) -> dict[str, Any] | None:
    """Read an earlier run's file to go on with it; None if there is none.

    Raises
    ------
    ValueError
        If it is from another device or commit.
    """
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    for key, value in (("device", device), ("commit", commit)):
        if found.get(key) != value:
            raise ValueError(
                f"{path} is from {key} {found.get(key)!r}, not {value!r}; name another file"
            )
    return found


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write the file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
    partial.replace(path)


def finished(
    results: Mapping[str, Any], key: tuple[str, str], contenders: Sequence[str], retry: bool = False
) -> bool:
    """Whether a row holds a time for every contender or (unless ``retry``) the reason for none."""
    for row in results["rows"]:
        if (row["name"], row["dtype"]) == key:
            again = retry and set(contenders) & set(row["missing"])
            return set(contenders) <= set(row["contenders"]) and not again
    return False


def median_of(rounds: Sequence[Mapping[str, float | None]], clock: str) -> float | None:
    """Median of one clock over the rounds."""
    values = [r[clock] for r in rounds if r.get(clock) is not None]
    return round(statistics.median(values), 3) if values else None


def spread_of(rounds: Sequence[Mapping[str, float | None]]) -> float:
    """Largest difference between rounds, as a share of their median: the noise of the warm time."""
    values = [r["warm"] for r in rounds]
    return round((max(values) - min(values)) / statistics.median(values), 4)


def floor_of(name: str, dtype: str, results: Mapping[str, Any]) -> float | None:
    """The row's floor on this device: known rates, or those that the run measured."""
    rates = KNOWN_RATES.get((results["device"], dtype))
    if rates is None:
        measured = results["ceilings"]
        launch = results["empty_kernel_us"].get("eager")
        known = [v for (device, _), v in KNOWN_RATES.items() if device == results["device"]]
        if dtype not in measured or launch is None:
            return None
        rates = (
            known[0][0] if known else measured["copy"],
            measured[dtype],
            known[0][2] if known else launch,
        )
    floor = ROWS[name].floor_us(dtype, *rates)
    return None if math.isnan(floor) else round(floor, 2)


def make_row(
    key: tuple[str, str],
    rounds: Rounds,
    about: Mapping[str, Mapping[str, Any]],
    missing: Mapping[str, str],
    results: Mapping[str, Any],
) -> dict[str, Any]:
    """Put one row together.

    Parameters
    ----------
    key : (str, str)
        Name and dtype.
    rounds : mapping
        Times of each contender that finished every round.
    about : mapping
        What the workers said of each contender's version of the row, its error included.
    missing : mapping
        Why a contender has no time.
    results : mapping
        The file so far (rates for the floor).
    """
    name, dtype = key
    row: dict[str, Any] = {"name": name, "dtype": dtype, "title": ROWS[name].title}
    for prefix, clock in CLOCKS.items():
        found = {c: median_of(r, clock) for c, r in rounds.items()}
        found = {c: us for c, us in found.items() if us is not None}
        experts = {c: us for c, us in found.items() if CONTENDERS[c].kind == "expert"}
        row[f"{prefix}ours_us"] = found.get("ours_tuned", found.get("ours"))
        row[f"{prefix}untuned_us"] = found.get("ours")
        row[f"{prefix}unfused_us"] = found.get("unfused")
        row[f"{prefix}peers"] = {c: us for c, us in found.items() if CONTENDERS[c].kind == "peer"}
        row[f"{prefix}expert_us"] = min(experts.values(), default=None)
        row[f"{prefix}experts"] = experts
        row[f"{prefix}extra"] = {c: us for c, us in found.items() if CONTENDERS[c].kind == "extra"}
    replays = {c: median_of(r, "replay") for c, r in rounds.items()}
    row["replay"] = {c: us for c, us in replays.items() if us is not None}
    row["floor_us"] = floor_of(name, dtype, results)
    row["errors"] = {c: a["error"] for c, a in about.items() if "error" in a}
    best = "ours_tuned" if "ours_tuned" in row["errors"] else "ours"
    row["error"] = row["errors"].get(best, {}).get("l2")
    row["missing"] = dict(missing)
    row["spread"] = {c: spread_of(r) for c, r in rounds.items()}
    row["contenders"] = sorted({*rounds, *missing})
    if row["ours_us"] and ROWS[name].elements:
        seconds = row["ours_us"] * 1e-6
        row["least_mib"] = round(ROWS[name].bytes(dtype) / 2**20, 3)
        row["gb_per_s"] = round(ROWS[name].bytes(dtype) / seconds / 1e9, 1)
        row["tflop_per_s"] = round(ROWS[name].flops / seconds / 1e12, 2)
    row["about"] = {c: {k: v for k, v in a.items() if k != "error"} for c, a in about.items()}
    return row


def put_row(results: dict[str, Any], row: dict[str, Any]) -> None:
    """Add a row, or replace the one of its name and dtype."""
    kept = [r for r in results["rows"] if (r["name"], r["dtype"]) != (row["name"], row["dtype"])]
    order = list(ROWS)
    results["rows"] = sorted([*kept, row], key=lambda r: (r["dtype"], order.index(r["name"])))


def read_parts(paths: Sequence[Path]) -> dict[str, Any]:
    """Read the files of one run (see `merged`)."""
    return merged([json.loads(path.read_text()) for path in paths])


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Results of one run that was made in parts; of a row in several the last counts.

    Raises
    ------
    ValueError
        If they are of several devices, drivers or commits.
    """
    whole = copy.deepcopy(dict(parts[0]))
    for part in parts[1:]:
        for key in ("device", "driver", "commit"):
            if part[key] != whole[key]:
                raise ValueError(f"{key} {part[key]!r} in one file, {whole[key]!r} in another")
        for key in ("versions", "ceilings", *(k for k in part if k.endswith("empty_kernel_us"))):
            whole[key] = {**whole.get(key, {}), **part[key]}
        for row in part["rows"]:
            put_row(whole, row)
    return whole
