"""Wheel, sdist and editable install, each in a clean environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = pytest.mark.slow

SMOKE = """
import numpy, tvm
from tvm import relax
import tvm_fusion as tf, tvm_fusion.schedules.cuda
from tvm_fusion.graph._native import Reachability

assert Reachability(3, [(0, 1), (1, 2)]).reaches(0, 2)
builder = relax.BlockBuilder()
x = relax.Var("x", relax.TensorType((4, 8), "float32"))
with builder.function("main", [x], {"num_input": 1}):
    with builder.dataflow():
        total = builder.emit(relax.op.add(x, x))
        out = builder.emit_output(relax.op.nn.relu(total))
    builder.emit_func_output(out)
model = tf.compile(builder.get(), "llvm")
value = numpy.linspace(-1, 1, 32, dtype="float32").reshape(4, 8)
numpy.testing.assert_array_equal(model(value)[0], numpy.maximum(value + value, 0))
print(tf.__file__)
print(tf.schedules.__file__)
"""


def call(*command: object, cwd: Path) -> str:
    """Run a command without this environment's Python settings; return its stdout."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the tree as a fresh clone would have it: nothing built, nothing ignored."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    copy = tmp_path_factory.mktemp("checkout") / "tvm_fusion"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    # Whether or not there are tuned records yet, such files are packed.
    records = copy / "tvm_fusion/tuning/records"
    records.mkdir(exist_ok=True)
    (records / "sm_70.jsonl").touch()
    return copy


@pytest.fixture(scope="module")
def sdist(checkout, tmp_path_factory) -> Path:
    """The source distribution, made in build isolation."""
    out = tmp_path_factory.mktemp("sdist")
    call(sys.executable, "-m", "build", "--sdist", "--outdir", out, checkout, cwd=out)
    return next(out.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory) -> Path:
    """The wheel, made in build isolation from the checkout."""
    out = tmp_path_factory.mktemp("wheel")
    call(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", out, checkout, cwd=out)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def clean(wheel, tmp_path_factory) -> Path:
    """A new environment into which the wheel was installed with what it requires."""
    folder = tmp_path_factory.mktemp("clean")
    call(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    call(folder / "venv/bin/pip", "install", wheel, cwd=folder)
    return folder / "venv/bin"


def smoke(bin_folder: Path, outside: Path) -> list[str]:
    """Use the installed package; return where it and its schedules lie."""
    assert call(bin_folder / "tvm-fusion", "--version", cwd=outside).strip()
    return call(bin_folder / "python", "-c", SMOKE, cwd=outside).splitlines()


def packed_names(archive: Path) -> set[str]:
    """Names inside a wheel."""
    with zipfile.ZipFile(archive) as wheel:
        return set(wheel.namelist())


def test_wheel(wheel, clean, tmp_path) -> None:
    assert "-py3-none-" in wheel.name
    names = packed_names(wheel)
    for name in (
        "_core.so",
        "py.typed",
        "cli/app.py",
        "schedules/__init__.py",
        "build/__init__.py",
        "report/templates/plan.html.j2",
        "report/templates/plan.css",
        "report/templates/plan.js",
        "tuning/records/sm_70.jsonl",
    ):
        assert f"tvm_fusion/{name}" in names
    # Only the package: no tests, no top-level "schedules", nothing of the build.
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"tvm_fusion"}
    for path in smoke(clean, tmp_path):
        assert "site-packages" in path


def test_wheel_inside_the_checkout(clean, checkout) -> None:
    """The program uses the installed package even where a checkout lies in the current folder."""
    assert call(clean / "tvm-fusion", "plan", "--help", cwd=checkout)
    if sys.version_info >= (3, 11):
        # -P keeps the current folder off the path.
        lines = call(clean / "python", "-P", "-c", SMOKE, cwd=checkout).splitlines()
        assert all("site-packages" in line for line in lines)


def test_sdist(sdist, wheel, clean, tmp_path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in (
        "CMakeLists.txt",
        "LICENSE",
        "pyproject.toml",
        "schedules/__init__.py",
        "setup.py",
        "tests/conftest.py",
        "tvm_fusion/csrc/reachability.h",
        "tvm_fusion/report/templates/plan.css",
        "tvm_fusion/tuning/records/sm_70.jsonl",
    ):
        assert name in names
    assert not [name for name in names if name.endswith(".so")]
    call(clean / "pip", "wheel", "--no-deps", "-w", tmp_path, sdist, cwd=tmp_path)
    rebuilt = next(tmp_path.glob("*.whl"))
    assert packed_names(rebuilt) == packed_names(wheel)
    call(clean / "pip", "install", "--no-deps", "--force-reinstall", rebuilt, cwd=tmp_path)
    smoke(clean, tmp_path)


def test_editable(checkout, clean, tmp_path) -> None:
    """Last of all: it replaces the wheel in the clean environment."""
    call(clean / "pip", "install", "--no-deps", "--editable", checkout, cwd=tmp_path)
    package, schedules = smoke(clean, tmp_path)
    assert Path(package) == checkout / "tvm_fusion/__init__.py"
    assert Path(schedules) == checkout / "schedules/__init__.py"
    # In the root of the checkout as well, with or without the folder on the path.
    assert smoke(clean, checkout) == [package, schedules]


def test_missing_compiler_or_cmake_is_not_silent(checkout, tmp_path) -> None:
    """Without cmake the build stops with a sentence, not with a library missing at run time."""
    script = (
        "import shutil, runpy, sys; shutil.which = lambda name: None; "
        f"sys.argv = ['setup.py', 'build_ext', '--build-temp', {str(tmp_path / 't')!r}, "
        f"'--build-lib', {str(tmp_path / 'l')!r}]; runpy.run_path('setup.py', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=checkout, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "cmake is missing; install it with: pip install cmake ninja" in done.stderr
