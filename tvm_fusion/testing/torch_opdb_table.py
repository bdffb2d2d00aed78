"""The record of PyTorch's operator database, and what the documentation says of it.

``python -m tvm_fusion.testing.torch_opdb_table`` runs the samples and writes both; with ``--page`` it writes the page
from the record that there is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .lasting_worker import LastingWorker
from .torch_opdb import LIMIT, Outcome, operators, run_samples, samples

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "frontend" / "torch_opdb.json"
PAGE = ROOT / "docs" / "torch.md"
MODULE = "tvm_fusion.testing.torch_opdb"

#: A sample's letter in the record.
LETTERS = {"right": "r", "constant": "c", "refused": "x", "no_export": "-"}

_BEGIN = "<!-- operators: made by tvm_fusion.testing.torch_opdb_table -->"
_END = "<!-- end of operators -->"


def record_of(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Return the record of a run.

    Returns
    -------
    dict
        ``torch``: version whose samples these are; ``operators``: by name a letter for each sample: r for right,
        c for a constant, x for refused, - for what PyTorch does not export.

    Raises
    ------
    ValueError
        If a sample is wrong, or refused without the name of an operator.
    """
    import torch

    found: dict[str, str] = {}
    bad = []
    for o in sorted(outcomes, key=lambda o: (o.operator, o.sample)):
        if o.verdict not in LETTERS:
            bad.append(f"{o.verdict} {o.operator} {o.sample}: {o.reason}")
            continue
        found[o.operator] = found.get(o.operator, "") + LETTERS[o.verdict]
    if bad:
        raise ValueError("\n".join(bad))
    return {"torch": torch.__version__.partition("+")[0], "operators": found}


def page_text(record: Mapping[str, Any], page: str) -> str:
    """Return the text of the page with the numbers of a record in their place."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n\n{_summary(record)}\n\n{_END}{after}"


def _summary(record: Mapping[str, Any]) -> str:
    found = record["operators"]
    letters = "".join(found.values())
    never = [name for name, verdicts in found.items() if "r" not in verdicts and "x" in verdicts]
    partly = [name for name, verdicts in found.items() if "r" in verdicts and "x" in verdicts]
    lines = [
        f"Torch {record['torch']}: {len(found)} operators, {len(letters) - letters.count('-')} samples that it "
        f"exports: {letters.count('r')} right, {letters.count('c')} with nothing to compute, "
        f"{letters.count('x')} refused.",
        "",
        f"Some samples refused: {', '.join(partly)}.",
        "",
        f"All samples refused: {', '.join(never)}.",
    ]
    return "\n".join(lines)


def run_all(workers: int = 2) -> list[Outcome]:
    """Run all samples in a few processes."""

    def work(names: list[str]) -> list[Outcome]:
        requests = [(name, number) for name in names for number in range(len(samples(name)))]
        with LastingWorker(MODULE, LIMIT) as worker:
            return list(run_samples(requests, worker))

    names = list(operators())
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
        RECORD.write_text(json.dumps(record_of(run_all()), indent=1) + "\n", encoding="utf-8")
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    PAGE.write_text(page_text(record, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
