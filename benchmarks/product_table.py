"""A table of what ``hopper_times.py`` measured.

    python benchmarks/product_table.py times.json [more.json]

Of several times of one kernel the last file's counts, and of the copy engine's tiles the fastest measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from products import SHAPES

#: Names of tiles of other templates.
_OTHERS = ("mma", "warpgroup")


def markdown(files: list[Path]) -> str:
    """The table, in Markdown."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in (row for path in files for row in json.loads(path.read_text()) if "us" in row):
        found.setdefault(row["shape"], {})[row["tile"]] = row
    lines = [
        "| product | rows x depth x columns, and what follows | copy engine: µs | its tile | TFLOP/s | error"
        " | other template: µs | cuBLAS alone: µs | cuBLAS and the rest: µs |",
        "| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, tiles in found.items():
        shape, cells = SHAPES[name], [name]
        cells.append(f"{shape.rows} x {shape.depth} x {shape.columns}, {shape.after}")
        own = [row for tile, row in tiles.items() if tile.startswith("bulk")]
        if not own:
            continue
        best = min(own, key=lambda row: row["us"])
        numbers = best["tile"].split("-")
        turns = ", by turns" if numbers[-1] == "2" else ""
        cells += [f"{best['us']:.1f}", f"{numbers[1]}x{numbers[2]}, {numbers[7]} stages{turns}"]
        cells += [f"{best['tflop_per_s']:.0f}", f"{best['error']:.1e}"]
        others = [row["us"] for tile, row in tiles.items() if tile.split("-")[0] in _OTHERS]
        cells.append(f"{min(others):.1f}" if others else "–")
        for contender in ("cublas", "cublas and the rest"):
            cells.append(f"{tiles[contender]['us']:.1f}" if contender in tiles else "–")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown([Path(name) for name in sys.argv[1:]]))
