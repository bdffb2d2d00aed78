"""The virtual environment in which the tests of Relay run: Python 3.10 and a TVM that still has Relay.

``python -m tvm_fusion.testing.relay_environment`` makes it in a checkout (``make relay-env`` does
that). Where there is no Python 3.10, or pip cannot have the wheel, it says so and leaves a note that
the skipped tests repeat.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

#: Where the environment is, beside the project's own.
FOLDER = ROOT / ".venv-relay"

#: What it holds. The wheel is a fork of TVM 0.16; tqdm and tflite are imported by it and not
#: declared. tvm-ffi, which this package's native core needs, stands beside any TVM.
REQUIREMENTS: tuple[str, ...] = (
    "hhb-tvm==3.2.3", "tqdm", "tflite", "apache-tvm-ffi==0.1.14.post0", "pytest", "hypothesis",
)  # fmt: skip

#: Name of a Python 3.10 to use, where none is found by itself.
VARIABLE = "TVM_FUSION_RELAY_PYTHON"

#: Set to 1 where a machine that cannot have the environment must fail, not skip.
REQUIRED = "TVM_FUSION_REQUIRE_RELAY"

_WANTED = "import sys; sys.exit(sys.version_info[:2] != (3, 10))"


def python_of(folder: Path = FOLDER) -> Path | None:
    """The environment's interpreter, None where it was not made."""
    python = folder / "bin" / "python"
    return python if (folder / "installed").exists() and python.exists() else None


def missing(folder: Path = FOLDER) -> str:
    """Why there is no environment."""
    note = folder / "missing"
    return note.read_text(encoding="utf-8") if note.exists() else "not made yet: run make relay-env"


def find_python() -> str | None:
    """A Python 3.10: the one that is named, on the path, or one of pyenv's."""
    named = os.environ.get(VARIABLE)
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    own = sorted(map(str, root.glob("versions/3.10.*/bin/python")), reverse=True)
    for candidate in [named] if named else ["python3.10", *own, "python3", sys.executable]:
        found = shutil.which(candidate)
        if found and subprocess.run([found, "-c", _WANTED], capture_output=True).returncode == 0:
            return found
    return None


def make(folder: Path = FOLDER, root: Path = ROOT) -> str:
    """Make the environment unless it is there.

    Parameters
    ----------
    folder : Path
        Where to make it.
    root : Path
        The checkout whose package is installed in it, without its dependencies.

    Returns
    -------
    str
        Why it could not be made; empty if it is there.
    """
    mark = folder / "installed"
    wanted = "\n".join(REQUIREMENTS)
    if mark.exists() and mark.read_text(encoding="utf-8") == wanted:
        return ""
    shutil.rmtree(folder, ignore_errors=True)
    python = find_python()
    reason = f"no Python 3.10 is found; set {VARIABLE} to one"
    if python is not None:
        pip = [
            folder / "bin" / "python",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ]
        commands = [
            [python, "-m", "venv", folder],
            [*pip, *REQUIREMENTS],
            [*pip, "--no-deps", "--editable", root],
        ]
        reason = next(filter(None, map(_failure, commands)), "")
    folder.mkdir(exist_ok=True)
    target = folder / "missing" if reason else mark
    target.write_text(reason or wanted, encoding="utf-8")
    return reason


def _failure(command: list[str | Path]) -> str:
    """Run a command; return the last line that it wrote if it failed."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    lines = (done.stderr or done.stdout).strip().splitlines()
    errors = [line for line in lines if "error" in line.lower()] or lines or ["no message"]
    return f"{' '.join(str(part) for part in command[:4])} failed: {errors[-1].strip()}"


if __name__ == "__main__":
    problem = make()
    print(f"The Relay tests are skipped: {problem}" if problem else f"Relay: {FOLDER}")
    sys.exit(bool(problem) and os.environ.get(REQUIRED) == "1")
