"""The migration guide, docs/relay-models.md: what it says to type is typed."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer

import tvm_fusion as tf
from tvm_fusion.cli.app import app
from tvm_fusion.compat import tvm
from tvm_fusion.frontend import relay
from tvm_fusion.testing import relay_environment
from tvm_fusion.testing.modules import parallel_convs
from tvm_fusion.testing.relay_fixtures import read_arrays

HERE = Path(__file__).resolve().parent
PAGE = (HERE.parents[2] / "docs" / "relay-models.md").read_text(encoding="utf-8")
PROGRAM = (sys.executable, "-m", "tvm_fusion.cli")


def blocks(language: str) -> list[str]:
    """The code blocks of the page in this language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


SAVE, LOAD, PIPELINE = blocks("python")
(SHELL,) = blocks("sh")


def call(command: list[object], folder: Path) -> str:
    """Run a command; show the end of what it wrote if it fails."""
    words = list(map(str, command))
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-1500:]}{done.stderr[-3000:]}"
    return done.stdout


def halves() -> tuple[str, str]:
    """The pipeline in Relay and here: the second stands in the comments of the first."""
    lines = PIPELINE.splitlines()[1:]
    column = PIPELINE.splitlines()[0].rindex("# here")
    assert all(line[column : column + 1] == "#" for line in lines)
    return (
        "\n".join(line[:column] for line in lines),
        "\n".join(line[column + 2 :] for line in lines),
    )


@pytest.mark.slow
@pytest.mark.relay
def test_a_model_from_the_old_script_to_a_library(tmp_path) -> None:
    """Saved by the page's script under a TVM with Relay; then each command and the Python code, on this CPU."""
    python = relay_environment.python_of()
    model = "from tvm.relay import testing\nmod, params = testing.synthetic.get_workload()\n"
    assert "# mod, params" in SAVE
    results = (
        "\nimport numpy as np\n"
        "x = np.random.RandomState(0).standard_normal((1, 3, 24, 12)).astype('float32')\n"
        "run = relay.create_executor('graph', mod, tvm.cpu(), 'llvm -mtriple=x86_64-linux-gnu').evaluate()\n"
        "np.savez('relay.npz', in_data=x, out_0=run(x, **params).numpy())\n"
    )
    call([python, "-c", SAVE.replace("# mod, params", f"{model}# mod, params") + results], tmp_path)
    for line in SHELL.splitlines():
        name, *words = shlex.split(re.sub(r"--target cuda\S*", "--target llvm", line))
        assert name == "tvm-fusion"
        words += ["--trials", "16"] if words[0] == "tune" else []
        out = call([*PROGRAM, *words], tmp_path)
        # The command that tuning tells to type next has the weights as well.
        assert out.strip() if words[0] != "tune" else "--params model.params" in out
    scope: dict[str, object] = {}
    folder = str(tmp_path)
    exec(LOAD.replace('"model.', f'"{folder}/model.'), scope)
    inputs, (want,) = read_arrays(tmp_path / "relay.npz")
    for run in (scope["exe"], tf.load(tmp_path / "model.so")):
        np.testing.assert_allclose(run(inputs["data"])[0], want, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.relay
def test_the_pipeline_of_relay(tmp_path) -> None:
    python = relay_environment.python_of()
    head = (
        "import tvm\nfrom tvm import relay\nfrom tvm_fusion.testing.relay_models import branches\n"
    )
    script = (
        f"{head}{halves()[0]}\nwith tvm.transform.PassContext(opt_level=3):\n    seq(branches())\n"
    )
    call([python, "-c", script], HERE.parents[2])


def test_the_pipeline_here() -> None:
    scope: dict[str, object] = {"tvm": tvm, "tf": tf}
    exec(halves()[1], scope)
    with tvm.target.Target("llvm"):
        mod = scope["seq"](parallel_convs(3, channels=8, spatial=8, relu=True))
    assert "call_tir" in str(mod["main"])


def test_names_of_the_table_exist() -> None:
    table = PAGE.split("## What to change in a script\n")[1].split("\n## ")[0]
    cells = [line.split(" | ")[-1] for line in table.splitlines() if line.startswith("| `")]
    code = re.findall(r"`([^`]+)`", " ".join(cells))
    for path in (re.match(r"tf\.([\w.]+)", text) for text in code):
        if path:
            found = tf
            for name in path[1].split("."):
                found = getattr(found, name)
    for text in code:  # options of the passes and verbs
        if match := re.match(r"tf\.transform\.(\w+)\((\w+)=", text):
            assert match[2] in inspect.signature(getattr(tf.transform, match[1])).parameters
    for keyword in re.findall(r"`(\w+)=", " ".join(cells)):
        known = {*inspect.signature(relay.load).parameters, *tf.FusionConfig.__dataclass_fields__}
        assert keyword in known, keyword


@pytest.mark.parametrize("line", SHELL.splitlines())
def test_commands_are_understood(line: str) -> None:
    name, *words = shlex.split(line)[1:]
    assert typer.main.get_command(app).commands[name].make_context(name, words).params
