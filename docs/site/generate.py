"""Pages of the site that are made from the code: options, guards, defaults, devices (a hook of MkDocs).

``mkdocs.yml`` names this file. The pages are made anew at each build, so they cannot differ from the code.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from tvm_fusion.cli.app import app
from tvm_fusion.cli.options import option
from tvm_fusion.config import FusionConfig
from tvm_fusion.devices import CPU, DEVICES, DeviceSpec
from tvm_fusion.guards.registry import GUARDS

ROOT = Path(__file__).resolve().parent.parent.parent

#: Pages and pictures from elsewhere in the tree, by where they stand in the site.
_COPIED = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks/index.md",
    "benchmarks/NOTES.md": "benchmarks/NOTES.md",
}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of this file to those of ``docs/`` (called by MkDocs)."""
    from mkdocs.structure.files import File

    for name, text in generated_pages():
        files.append(File.generated(config, name, content=text))
    results = [f"benchmarks/results/{f.name}" for f in (ROOT / "benchmarks/results").iterdir()]
    shown = [name for name in results if name.endswith((".md", ".png"))]
    for source, name in [*_COPIED.items(), *((name, name) for name in sorted(shown))]:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links of ``docs/`` to files beside it lead to their copies in the site (called by MkDocs)."""
    markdown = markdown.replace("](../benchmarks/", "](benchmarks/")
    for source, name in _COPIED.items():
        markdown = markdown.replace(f"](../{source})", f"]({name})")
    return markdown


def generated_pages() -> Iterator[tuple[str, str]]:
    """Yield name and text of each page that is made from the code."""
    yield "cli-options.md", cli_page()
    yield "guards.md", guards_page()
    yield "devices.md", devices_page()


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for row in rows:
        # Within backquotes a bar is no border.
        cells = [" ".join(re.sub(r"\|(?=[^`]*(?:`[^`]*`[^`]*)*$)", r"\|", c).split()) for c in row]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cli_page() -> str:
    """Every command with its arguments and options, as ``--help`` has them."""
    root = typer.main.get_command(app)
    parts = [
        "# All options\n",
        "What `tvm-fusion COMMAND --help` says, in one page. [cli.md](cli.md) groups and explains them.\n",
    ]
    for names, command in _commands(root, ()):
        context = command.make_context(names[-1], [], resilient_parsing=True)
        parts.append(f"## `tvm-fusion {' '.join(names)}`\n\n{command.help}\n")
        rows = [_option_row(param, context) for param in command.params if param.name != "help"]
        parts.append(table(("argument or option", "meaning"), rows) + "\n")
        examples = [
            line for line in (command.epilog or "").splitlines() if line and ":" != line[-1]
        ]
        parts.append("```sh\n" + "\n".join(examples) + "\n```\n")
    return "\n".join(parts)


def _commands(command: Any, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The commands below a group, with the words that call them."""
    for name, child in command.commands.items():
        if hasattr(child, "commands"):
            yield from _commands(child, (*names, name))
        else:
            yield (*names, name), child


def _option_row(param: Any, context: Any) -> tuple[str, str]:
    """Name and meaning with the default, as the program's own help has them."""
    # Arguments have a record in newer releases of typer only.
    record = param.get_help_record(context) or (f"{param.metavar}", f"{param.help}  [required]")
    return f"`{record[0]}`", record[1].replace("[required]", "*required*")


def guards_page() -> str:
    """The guards in the order in which they are asked, and the defaults of the configuration."""
    guards = [
        (f"`{guard.reason}`", f"`{type(guard).__name__}`", inspect.getdoc(type(guard)) or "")
        for guard in GUARDS
    ]
    described = _described_fields()
    fields = [
        (
            f"`{field.name}`",
            f"`{option(field.name)}`",
            f"`{field.default!r}`",
            described[field.name],
        )
        for field in dataclasses.fields(FusionConfig)
    ]
    return "\n".join(
        [
            "# Guards and defaults\n",
            "A guard looks at one proposed group and accepts it, or refuses it with a "
            "[reason code](reason-codes.md), figures and a sentence. They are asked in this order, and the first "
            "refusal counts.\n",
            table(("reason", "guard", "what it refuses"), guards),
            "\n## Defaults\n",
            "Fields of `tvm_fusion.FusionConfig`, and the same as options of the commands.\n",
            table(("field", "option", "default", "meaning"), fields) + "\n",
        ]
    )


def _described_fields() -> dict[str, str]:
    """What the docstring of the configuration says of each field."""
    found: dict[str, str] = {}
    name = ""
    for line in inspect.getdoc(FusionConfig).split("----------\n")[1].splitlines():
        if line and not line.startswith(" "):
            name = line.partition(" :")[0]
            found[name] = ""
        else:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def devices_page() -> str:
    """The chips that predictions know, with the source of each number."""
    rates = ("float64", "float32", "tf32", "float16", "bfloat16")
    heads = (
        "arch", "chip", "multiprocessors", "shared memory of a block, KiB", "level-2 cache, MiB", "GB/s",
        *(f"{name}, TFLOP/s" for name in rates),
    )  # fmt: skip
    chips = list(DEVICES.values())
    return "\n".join(
        [
            "---\nhide: [toc]\n---\n\n# Devices\n",  # its table is wide
            "Limits and peak rates that plans are made with: the makers' figures, not measurements. An arch without "
            "a row borrows the nearest lower one, and the plan says so.\n",
            table(heads, [_device_row(device, rates) for device in chips]),
            f"\nFor a CPU plans use *{CPU.name}*: {dict(CPU.flops)['float32'] / 1e9:g} GFLOP/s in float32, "
            f"{CPU.memory_bandwidth / 1e9:g} GB/s, {CPU.cache_bytes / 2**20:g} MiB of cache. It is the same on every "
            "machine, so that a plan does not depend on where it is made.\n",
            "## Sources\n",
            *(f"- `{device.arch}`: {device.source}" for device in (*chips, CPU)),
            "",
        ]
    )


def _device_row(device: DeviceSpec, rates: tuple[str, ...]) -> tuple[str, ...]:
    known = dict(device.flops)
    return (
        f"`{device.arch}`",
        device.name,
        f"{device.multiprocessors}",
        f"{device.shared_memory_per_block_optin / 1024:g}",
        f"{device.cache_bytes / 2**20:g}",
        f"{device.memory_bandwidth / 1e9:g}",
        *(f"{known[name] / 1e12:g}" if name in known else "–" for name in rates),
    )
