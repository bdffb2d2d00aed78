"""Every command and every Python example of the pages runs as it is printed, or says here why it does not.

The examples of a page run one after the other in one folder, as a reader types them. What a page takes for
granted (a model, an array) is in ``given``; what this machine may not have is replaced (``SUBSTITUTES``).
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import typer

import tvm_fusion as tf
from tvm_fusion.cli import main
from tvm_fusion.cli.app import app
from tvm_fusion.compat import tvm
from tvm_fusion.report import render_plan
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.models import light_model
from tvm_fusion.testing.page_model import write_model
from tvm_fusion.tuning.tuner import BATCH

ROOT = Path(__file__).resolve().parent.parent

PAGES = (
    "README.md", "CONTRIBUTING.md", "tutorials/README.md", "benchmarks/README.md",
    *(f"docs/{file.name}" for file in sorted((ROOT / "docs").glob("*.md"))),
)  # fmt: skip

#: Pages whose examples another test runs.
ELSEWHERE = {
    "docs/relay-models.md": "tests/frontend/relay/test_relay_page.py, under a TVM with Relay and here",
    "docs/relay.md": "tests/relay/inside/test_models.py, under a TVM with Relay",
}

#: Beginnings of commands that are not run, and why.
NOT_RUN = {
    "make ": "installs and runs everything; .ci/run calls these targets",
    "pip install": "tests/packaging/test_installs.py installs in clean environments",
    ".venv/bin/pip install": "changes this environment and the checkout's hooks",
    "cd tutorials": "starts a server; tests/tutorials runs the notebooks",
    "git add": "the folder is in no repository here",
    "pytest ": "these tests themselves",
    "python -m tvm_fusion.testing.onnx_table": "takes minutes; its record is read by test_onnx_suite.py",
    "python -m tvm.exec.rpc_": "runs until it is stopped; tests/tuning/test_rpc_runner.py starts both",
    "python benchmarks/": "measures on a GPU; tests/benchmarks has the scripts, their options are tested here",
    "tvm-fusion tune resnet50.onnx --work-dir tuned --target cuda:sm_90a --dtype float16 --rpc":
        "needs a tracker with servers; tests/tuning/test_rpc_runner.py has both",
}  # fmt: skip

#: Python blocks that are not run, by their first line, and why.
PYTHON_NOT_RUN = {
    "model.launch([x], [y])": "needs a GPU; tests/gpu launches without a graph",
}

#: What is replaced in commands and Python, and why.
SUBSTITUTES = (
    # A reader of that line has a GPU. Records of tuning are of this machine, so what follows uses its processor, too.
    (r"(tune|compile|verify)( .*)--target cuda\S*", r"\1\2--target llvm"),
    (r"^(tvm-fusion tune .*?)(?: --minutes \d+)?$", rf"\1 --trials {BATCH}"),
    (r"devices=\(0, 1\)\) as bench", r") as bench"),
    (r"(tune_model\(module, .*)\)$", rf"\1, trials={BATCH})"),
)

#: Blocks in no language, by page: what is in them, and the test that looks at it.
SHOWN = {
    "docs/cli.md": "test_summary_of_commands",
    "docs/database.md": "check_results",
    "docs/read-a-plan.md": "test_plan_that_is_shown",
}

#: Pages that take seconds only.
QUICK = ("docs/api.md", "docs/your-own-pipeline.md")

Block = tuple[str, str]


def blocks(page: str) -> Iterator[Block]:
    """Language and text of the fenced blocks of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text.count("\n```") % 2 == 0, page
    for match in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE):
        yield match[2], match[3]


def commands(block: Block) -> list[str]:
    """The commands of a block: its lines, or the ``run`` steps of a workflow."""
    language, text = block
    if language == "yaml":
        return re.findall(r"- run: (.*?)(?: +#.*)?$", text, re.MULTILINE)
    return [shlex.join(shlex.split(line, comments=True)) for line in text.splitlines()]


def substituted(text: str) -> str:
    for pattern, replacement in SUBSTITUTES:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return text


def skipped(line: str) -> str | None:
    """The reason why a command is not run."""
    return next((why for start, why in NOT_RUN.items() if line.startswith(start)), None)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with the files that pages take for granted; the current one."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model.onnx")
    write_model(tmp_path / "resnet50.onnx")
    onnx.save(light_model("squeezenet"), tmp_path / "squeezenet.onnx")
    image = np.random.default_rng(1).standard_normal((1, 3, 224, 224), dtype="float32")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    np.save(tmp_path / "image.npy", image)
    np.save(tmp_path / "input.npy", image)
    np.save(tmp_path / "output.npy", session.run(None, {"data": image})[0])
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def given(page: str, folder: Path) -> dict[str, object]:
    """The names that the Python of the pages takes for granted."""

    @tvm.transform.module_pass(opt_level=0, name="MyPass")
    class MyPass:
        def transform_module(self, mod, _context):
            assert any("tvm_fusion.strategy" in func.attrs for func in mod.functions.values())
            return mod

    image = np.load(folder / "image.npy")
    mod = tf.frontend.load("model.onnx")
    scope = {"tf": tf, "tvm": tvm, "mod": mod, "image": image, "x": image, "array": image}
    scope |= {"MyPass": MyPass, "target": parse_target("llvm"), "modules": {"model": mod}}
    if page == "docs/running.md":
        tf.compile(mod, "llvm").export("resnet50.so")
    if page == "docs/database.md":
        tf.tune(mod, "llvm", "work", trials=BATCH)
    return scope


def run_command(line: str) -> None:
    line = substituted(line)
    if line.startswith("tvm-fusion "):
        assert main(shlex.split(line)[1:]) == 0, line
        return
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    words = ["bash", "-c", line]
    done = subprocess.run(
        words, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{line}\n{done.stdout[-1000:]}{done.stderr[-3000:]}"


def marked(page: str) -> object:
    return page if page in QUICK else pytest.param(page, marks=pytest.mark.slow)


RUN = [
    page
    for page in PAGES
    if page not in ELSEWHERE
    and any(
        language == "python" or (language in ("sh", "yaml") and not all(map(skipped, commands((language, text)))))
        for language, text in blocks(page)
    )
]  # fmt: skip


def run_examples(page: str, folder: Path, languages: tuple[str, ...]) -> dict[str, object]:
    """Run the blocks of a page in these languages, in their order; return the names that Python made."""
    scope = given(page, folder)
    for language, text in blocks(page):
        if language not in languages:
            continue
        if language != "python":
            for line in filter(None, commands((language, text))):
                if skipped(line) is None:
                    run_command(line)
        elif text.splitlines()[0].split("  ")[0] not in PYTHON_NOT_RUN:
            exec(compile(substituted(text), page, "exec"), scope)
    return scope


@pytest.mark.parametrize("page", [*map(marked, RUN)])
def test_examples_of(page: str, folder: Path) -> None:
    check_results(page, folder, run_examples(page, folder, ("sh", "yaml", "python")))


def test_python_of_the_readme(folder: Path) -> None:
    """As among the examples of that page, without its commands, which take long."""
    scope = run_examples("README.md", folder, ("python",))
    assert scope["report"].passed and "call_tir" in str(scope["mod"])
    assert (folder / "resnet50.so").is_file()


def check_results(page: str, folder: Path, scope: dict[str, object]) -> None:
    """What a page promises of its examples, beyond that they run."""
    if page == "README.md":
        made = ("plan.json", "plan.html", "resnet50.so", "results/softmax.npy", "tuning.html")
        assert all((folder / name).is_file() for name in made)
    if page == "docs/your-own-pipeline.md":
        kernels = {
            var.name_hint: func.attrs.get("tirx.is_scheduled", False)
            for var, func in scope["mod"].functions.items()
            if isinstance(func, tvm.tirx.PrimFunc)
        }
        assert not kernels.pop("reshape") and len(kernels) > 4 and all(kernels.values()), kernels
    if page == "docs/deny-a-fusion.md":
        assert scope["unwanted"] not in {group.id for group in scope["plan"].groups}
    if page == "docs/database.md":
        (listing,) = [text for language, text in blocks(page) if language == "text"]
        (place,) = (folder / "work").iterdir()
        assert re.fullmatch(r"x86_64-float32-tvm[\w.]+", place.name)
        for name in set(re.findall(r"\S+\.jsonl?", listing)) - {"model.json"}:  # needs more trials
            assert (place / name.replace("NAME", "model")).is_file(), name
    if page == "docs/deploy.md":
        expected = np.load(folder / "output.npy")
        np.testing.assert_allclose(scope["result"].numpy(), expected, rtol=1e-4, atol=1e-6)


def test_every_exception_is_of_a_page() -> None:
    """No reason is left of what is no longer printed; blocks are in a language that is looked at."""
    found = [(page, block) for page in PAGES for block in blocks(page)]
    lines = [line for _, block in found if block[0] in ("sh", "yaml") for line in commands(block)]
    for start in NOT_RUN:
        assert any(line.startswith(start) for line in lines), start
    python = [text for _, (language, text) in found if language == "python"]
    for start in PYTHON_NOT_RUN:
        assert any(text.startswith(start) for text in python), start
    texts = {page for page, (language, _) in found if language == "text"}
    assert texts == set(SHOWN) and all(name in globals() for name in SHOWN.values())
    assert {language for _, (language, _) in found} <= {"sh", "python", "yaml", "text"}


def test_summary_of_commands() -> None:
    (text,) = [text for language, text in blocks("docs/cli.md") if language == "text"]
    names = re.findall(r"^tvm-fusion (\w+)", text, re.MULTILINE)
    assert sorted(names) == sorted(typer.main.get_command(app).commands)


def test_plan_that_is_shown(tmp_path) -> None:
    """The plan on the page is SqueezeNet's of today."""
    onnx.save(light_model("squeezenet"), tmp_path / "squeezenet.onnx")
    mod = tf.frontend.load(tmp_path / "squeezenet.onnx")
    cores = tvm.target.Target({"kind": "llvm", "num-cores": 8})
    plan = tf.plan(mod, cores, name="squeezenet")
    printed = {" ".join(line.split()) for line in render_plan(plan, width=160).splitlines()}
    shown = [
        " ".join(line.split())
        for language, text in blocks("docs/read-a-plan.md")
        if language == "text"
        for line in text.splitlines()
    ]
    assert len(shown) == 9 and set(shown) <= printed, set(shown) - printed


def test_benchmarks_have_the_options_that_are_shown() -> None:
    shell = [block for page in PAGES for block in blocks(page) if block[0] == "sh"]
    lines = [line for block in shell for line in commands(block)]
    scripts = [shlex.split(line)[1:] for line in lines if line.startswith("python benchmarks/")]
    assert scripts
    for script, *words in scripts:
        source = (ROOT / script).read_text(encoding="utf-8")
        for word in words:
            assert not word.startswith("--") or f'"{word}"' in source, (script, word)
