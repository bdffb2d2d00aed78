"""The record of ONNX's backend suite, and the page of the documentation that is made from it.

``python -m tvm_fusion.testing.onnx_table`` runs the suite and writes both; with ``--page`` it
writes the page from the record that there is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .lasting_worker import LastingWorker
from .onnx_suite import LIMIT, Outcome, cases, run_cases

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "frontend" / "onnx_suite.json"
PAGE = ROOT / "docs" / "onnx.md"
MODULE = "tvm_fusion.testing.onnx_suite"

_BEGIN, _END = "<!-- table: made by tvm_fusion.testing.onnx_table -->", "<!-- end of table -->"


def record_of(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Return the record of a run of the suite.

    Returns
    -------
    dict
        ``onnx``: version of the suite; ``float_inference``: names of the cases that compute
        floating point results of inference operators; ``operators``: for each, the names of the
        cases that are right, and of those that are refused.

    Raises
    ------
    ValueError
        If a case is neither right nor refused.
    """
    import onnx

    operators: dict[str, dict[str, list[str]]] = {}
    bad = []
    for outcome in sorted(outcomes, key=lambda o: o.name):
        if outcome.verdict not in ("right", "refused"):
            bad.append(f"{outcome.verdict} {outcome.name}: {outcome.reason}")
            continue
        entry = operators.setdefault(outcome.operator, {"right": [], "refused": []})
        entry[outcome.verdict].append(outcome.name)
    if bad:
        raise ValueError("\n".join(bad))
    floats = [name for name, case in cases().items() if case.is_float_inference]
    return {
        "onnx": onnx.__version__,
        "float_inference": floats,
        "operators": dict(sorted(operators.items())),
    }


def page_text(record: Mapping[str, Any], page: str) -> str:
    """Return the text of the page with the table of a record in its place."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n\n{_table(record)}\n\n{_END}{after}"


def _table(record: Mapping[str, Any]) -> str:
    operators = record["operators"]
    right = sum(len(entry["right"]) for entry in operators.values())
    refused = sum(len(entry["refused"]) for entry in operators.values())
    floats = set(record["float_inference"])
    good = sum(name in floats for entry in operators.values() for name in entry["right"])
    lines = [
        f"Suite of onnx {record['onnx']}: {right + refused} cases, {right} right, {refused} refused. "
        f"Of the {len(floats)} cases of inference with floating point results, {good} are right "
        f"({100 * good / len(floats):.1f} %).",
        "",
        "| operator | right | refused |",
        "|---|---:|---:|",
    ]
    lines += [
        f"| {name} | {len(entry['right'])} | {len(entry['refused'])} |"
        for name, entry in operators.items()
    ]
    return "\n".join(lines)


def run_suite(workers: int = 2) -> list[Outcome]:
    """Run all cases in a few processes."""
    names = list(cases())

    def work(part: list[str]) -> list[Outcome]:
        with LastingWorker(MODULE, LIMIT) as worker:
            return list(run_cases(part, worker))

    with ThreadPoolExecutor(workers) as pool:
        parts = pool.map(work, [names[i::workers] for i in range(workers)])
        return [outcome for part in parts for outcome in part]


def main() -> None:
    """Write the record and the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--page", action="store_true", help="write the page from the record that there is"
    )
    if not parser.parse_args().page:
        RECORD.write_text(json.dumps(record_of(run_suite()), indent=1) + "\n", encoding="utf-8")
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    PAGE.write_text(page_text(record, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
