"""Reports of NVIDIA's compute-sanitizer, read from what it prints.

Besides what kernels do wrong, its ``memcheck`` counts every call of the CUDA API that returns an error (its option
``--report-api-errors``), also one whose failure the caller expects and handles; ``racecheck`` and ``synccheck`` do not.
https://docs.nvidia.com/compute-sanitizer/ComputeSanitizer/index.html
"""

from __future__ import annotations

import dataclasses
import re

#: Calls that fail by design: they ask whether this driver has a function. Their caller goes on without it.
QUERIES = frozenset({"cuGetProcAddress", "cuGetProcAddress_v2"})

_PREFIX = "========="
_CALL = re.compile(r"Program hit (\S+) .*\bon CUDA API call to (\w+)")
_SUMMARY = re.compile(rf"^{_PREFIX} (?:RACECHECK|ERROR) SUMMARY: (\d+)", re.MULTILINE)
_NO_REPORT = re.compile(r"COMPUTE-SANITIZER|.*\bSUMMARY:")


@dataclasses.dataclass(frozen=True)
class Report:
    """One report.

    Attributes
    ----------
    lines : tuple of str
        Its lines, without the prefix.
    call : str
        The call of the CUDA API that failed; empty if the report is of a kernel, or of the program.
    """

    lines: tuple[str, ...]
    call: str = ""

    @property
    def is_query(self) -> bool:
        """Whether it only says that this driver lacks a function."""
        return self.call in QUERIES


def reports(output: str) -> list[Report]:
    """Return the reports in what compute-sanitizer printed.

    Parameters
    ----------
    output : str
        Its standard output; lines of the program are passed over.
    """
    found: list[list[str]] = []
    for line in output.splitlines():
        if not line.startswith(_PREFIX):
            continue
        text = line[len(_PREFIX) :].rstrip()
        if text.startswith("  "):  # belongs to the report before
            if found:
                found[-1].append(text.strip())
        elif text and not _NO_REPORT.match(text.strip()):
            found.append([text.strip()])
    calls = [_CALL.search(lines[0]) for lines in found]
    return [
        Report(tuple(lines), call[2] if call else "")
        for lines, call in zip(found, calls, strict=True)
    ]


def count(output: str) -> int | None:
    """Return how many errors the summary counts; None without a summary."""
    summary = _SUMMARY.search(output)
    return int(summary[1]) if summary else None


def explain(output: str, most: int = 5, lines: int = 8) -> str:
    """Return what is wrong, or an empty text.

    Nothing is wrong if there is a summary and it counts no more than the queries (`QUERIES`) that are reported.

    Parameters
    ----------
    output : str
        What compute-sanitizer printed.
    most : int
        Reports to show, those of kernels first.
    lines : int
        First lines to show of each.
    """
    total, found = count(output), reports(output)
    if total is None:
        return f"no summary; the end is:\n{output[-2000:]}"
    queries = sum(report.is_query for report in found)
    if total <= queries:
        return ""
    others = sorted((r for r in found if not r.is_query), key=lambda r: bool(r.call))
    calls = sum(bool(report.call) for report in others)
    text = [
        f"{total - queries} errors: {len(others) - calls} reports of kernels or the program, "
        f"{calls} of failed CUDA calls"
    ]
    text += ["\n".join(report.lines[:lines]) for report in others[:most]]
    return "\n\n".join(text)
