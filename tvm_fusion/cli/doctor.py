"""``tvm-fusion doctor``: what this machine can do, and what is missing for what.

Every check stands alone, so that it works where TVM does not import. Nothing of TVM is imported before it is asked for.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .._version import __version__
from ..errors import FusionError

#: Free space in the folder for temporary files below which tuning and compilation get into trouble.
_LEAST_FREE = 2**30

#: Least Python (setup.py has the same).
_PYTHON = (3, 10)

#: Modules by the name of their distribution, where the two differ.
_MODULES = {"apache-tvm": "tvm", "apache-tvm-ffi": "tvm_ffi", "cuda-bindings": "cuda.bindings"}


@dataclasses.dataclass(frozen=True)
class Check:
    """Something that was looked for.

    Attributes
    ----------
    name : str
        What it is.
    state : {"ok", "missing", "wrong"}
        Whether it is there and usable.
    found : str
        Version or place, or what is wrong.
    repair : str
        What to do where it is not ok.
    """

    name: str
    state: str
    found: str = ""
    repair: str = ""

    @property
    def fine(self) -> bool:
        """Whether it is there and usable."""
        return self.state == "ok"


#: What imports and calls raise where parts of an installation do not fit each other.
_BROKEN = (FusionError, ImportError, OSError, RuntimeError, AttributeError, ValueError, TypeError)

#: What can be done with what: a job, and names of checks, of which each must be fine ("a|b": one of them).
JOBS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("plan and explain, for any target", ("Python", "packages", "native core")),
    ("verify, run and bench on this CPU",
     ("Python", "packages", "native core", "temporary files", "trial run")),
    ("compile and tune for this CPU",
     ("Python", "packages", "native core", "C++ compiler", "temporary files", "trial run")),
    ("read ONNX files", ("packages", "extra onnx")),
    ("read PyTorch programs", ("packages", "extra torch")),
    ("compile for CUDA", ("packages", "native core", "C++ compiler", "nvcc|NVRTC")),
    ("read registers and spills (plan --build)", ("packages", "nvcc", "ptxas")),
    ("run, bench and tune on this GPU", ("packages", "native core", "GPU", "nvcc|NVRTC")),
    ("start a tracker of TVM's RPC here", ("packages", "extra rpc")),
)  # fmt: skip

#: The job without which nothing works: its failure is the exit code.
_LEAST = 2


def doctor(
    format: Annotated[Literal["text", "json"], typer.Option(help="How to print it.")] = "text",
) -> int:
    """Say what this machine can do, and what is missing for what.

    Examples
    --------
    tvm-fusion doctor
    tvm-fusion doctor --format json
    """
    checks = {check.name: check for check in examine()}
    jobs = [(job, missing(checks, needs)) for job, needs in JOBS]
    if format == "json":
        found = {
            "checks": [dataclasses.asdict(check) for check in checks.values()],
            "jobs": [{"job": job, "missing": names} for job, names in jobs],
        }
        print(json.dumps(found, indent=2))
    else:
        print(as_text(list(checks.values()), jobs))
    return 2 if jobs[0][1] or jobs[_LEAST][1] else 0


def missing(checks: dict[str, Check], needs: Sequence[str]) -> list[str]:
    """What a job lacks: names of checks, alternatives joined by "or"."""
    return [
        need.replace("|", " or ")
        for need in needs
        if not any(checks[name].fine for name in need.split("|"))
    ]


def as_text(checks: Sequence[Check], jobs: Sequence[tuple[str, list[str]]]) -> str:
    """The checks and the jobs for people."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.state:7}  {check.name:{width}}  {check.found}".rstrip())
        if check.repair and not check.fine:
            lines.append(f"{'':9}{'':{width}}  → {check.repair}")
    lines += ["", "On this machine you can"]
    for job, lacking in jobs:
        lines.append(f"  {'no ' if lacking else 'yes'}  {job}")
        if lacking:
            lines[-1] += f"; missing: {', '.join(lacking)}"
    return "\n".join(lines)


def examine() -> Iterator[Check]:
    """Yield every check, in the order of the report."""
    yield _python()
    yield Check("tvm_fusion", "ok", f"{__version__} in {Path(__file__).resolve().parent.parent}")
    yield _packages()
    yield guarded("native core", _native_core)
    yield _compiler()
    yield _temporary_files()
    for name in ("onnx", "torch", "rpc"):
        yield _extra(name)
    yield from _cuda_tools()
    yield _gpu()
    yield guarded("trial run", _trial_run)


def guarded(name: str, check: Callable[[], Check]) -> Check:
    """Run a check that calls native code and TVM: what a broken installation raises is what is wrong."""
    try:
        return check()
    except _BROKEN as error:
        text = next(iter(str(error).splitlines()), "") or type(error).__name__
        return Check(
            name, "wrong", text, "install the package again: pip install --force-reinstall"
        )


def _python() -> Check:
    version = f"{platform.python_version()} ({platform.machine()} {platform.system()})"
    if sys.version_info < _PYTHON:
        return Check("Python", "wrong", version, "install Python 3.10 or newer")
    return Check("Python", "ok", version)


def requirements(extra: str | None = None) -> list[tuple[str, str | None]]:
    """Distributions that the package requires, with the pinned version (or None), of itself or of an extra."""
    found = []
    for line in importlib.metadata.requires("tvm_fusion") or ():
        text, _, marker = line.partition(";")
        named = re.search(r"""extra == ["'](\w+)["']""", marker)
        match = re.match(r"([\w.-]+)(?:\[[^]]*\])?(?:==([\w.]+)$)?", text.replace(" ", ""))
        if (named[1] if named else None) == extra and match:
            found.append((match[1], match[2]))
    return found


def version_of(name: str) -> str | None:
    """Version of a distribution; that of its module where it goes by another name; None if there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        module = _MODULES.get(name, name.replace("-", "_"))
    try:
        if importlib.util.find_spec(module) is None:
            return None
    except ModuleNotFoundError:  # of its parent
        return None
    # Another build of the same module, as xgboost-cpu is of xgboost.
    other = importlib.metadata.packages_distributions().get(module.partition(".")[0], ())
    return importlib.metadata.version(other[0]) if other else "installed"


def _packages() -> Check:
    """What the package requires, the pinned ones in their version."""
    wanted = requirements()
    found = {name: version_of(name) for name, _ in wanted}
    wrong = [
        f"{name} {found[name] or 'is missing'}" + (f", needs {pin}" if pin else "")
        for name, pin in wanted
        if found[name] is None or (pin and found[name] != pin)
    ]
    if wrong:
        # The wrong ffi crashes when TVM tunes, without a message.
        return Check(
            "packages", "wrong", "; ".join(wrong), "pip install --force-reinstall tvm_fusion"
        )
    shown = ", ".join(f"{name} {found[name]}" for name, pin in wanted if pin)
    return Check("packages", "ok", f"{shown} and {sum(not pin for _, pin in wanted)} more")


def _native_core() -> Check:
    from ..graph._native import LIBRARY, Reachability

    if not Reachability(3, [(0, 1), (1, 2)]).reaches(0, 2):
        return Check(
            "native core", "wrong", f"{LIBRARY} answers wrongly", "install the package again"
        )
    return Check("native core", "ok", LIBRARY.name)


def _compiler() -> Check:
    """The compiler with which TVM links libraries."""
    named = os.environ.get("CXX") or os.environ.get("CC")
    names = [named] if named else ["g++", "gcc", "clang++", "clang", "c++", "cc"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        text = f"{named} (CXX or CC) is not there" if named else "none on PATH"
        return Check(
            "C++ compiler", "missing", text, "install g++ or clang++; it links the libraries"
        )
    return Check("C++ compiler", "ok", _first_line(found, "--version") or found)


def _first_line(*command: str) -> str:
    """First line that a program prints; empty where it does not run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(done.stdout.splitlines()), "")


def _temporary_files() -> Check:
    name = "temporary files"
    try:
        folder = tempfile.gettempdir()
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        return Check(
            name, "wrong", f"{error.strerror}", "set TMPDIR to a folder that can be written"
        )
    free = shutil.disk_usage(folder).free
    text = f"{folder}, {free / 2**30:.1f} GiB free"
    if free < _LEAST_FREE:
        return Check(name, "wrong", text, "free some space there, or set TMPDIR to another folder")
    return Check(name, "ok", text)


def _extra(name: str) -> Check:
    found = {package: version_of(package) for package, _ in requirements(name)}
    lacking = [package for package, version in found.items() if version is None]
    if lacking:
        text = f"{', '.join(lacking)} not installed"
        return Check(f"extra {name}", "missing", text, f"pip install 'tvm_fusion[{name}]'")
    shown = ", ".join(f"{package} {version}" for package, version in found.items())
    return Check(f"extra {name}", "ok", shown)


def _cuda_tools() -> Iterator[Check]:
    """NVIDIA's compilers; ``find_nvcc`` imports TVM, so it is asked last."""
    repair = "install a CUDA toolkit, or pip install 'tvm_fusion[cuda]'"
    nvcc = guarded("nvcc", _nvcc)
    if not nvcc.fine:
        nvcc = Check("nvcc", "missing", "", repair)
    yield nvcc
    ptxas = shutil.which("ptxas")
    if nvcc.fine and ptxas is None:
        beside = Path(nvcc.found.split(" ")[0]).resolve().with_name("ptxas")
        ptxas = str(beside) if beside.is_file() else None
    yield Check("ptxas", "ok", ptxas) if ptxas else Check("ptxas", "missing", "", repair)
    nvrtc = version_of("cuda-bindings")
    yield (
        Check("NVRTC", "ok", f"cuda-bindings {nvrtc}")
        if nvrtc
        else Check("NVRTC", "missing", "", repair)
    )


def _nvcc() -> Check:
    from ..build.ptxas import find_nvcc

    path = find_nvcc()
    done = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=20, check=True
    )
    release = re.search(r"release ([\d.]+)", done.stdout)
    return Check("nvcc", "ok", f"{path} {release[1] if release else ''}".rstrip())


def _gpu() -> Check:
    """GPUs as the driver lists them, without TVM."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Check(
            "GPU",
            "missing",
            "no NVIDIA driver",
            "not needed to plan or compile: --target cuda:sm_90",
        )
    code, count, version = driver.cuInit(0), ctypes.c_int(), ctypes.c_int()
    if code == 0:
        code = driver.cuDeviceGetCount(ctypes.byref(count))
    driver.cuDriverGetVersion(ctypes.byref(version))
    cuda = f"driver for CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    if code or not count.value:
        return Check(
            "GPU",
            "missing",
            f"{cuda}, no device (code {code})",
            "run nvidia-smi; check CUDA_VISIBLE_DEVICES",
        )
    names = [_gpu_name(driver, number) for number in range(count.value)]
    return Check("GPU", "ok", f"{', '.join(names)}; {cuda}")


def _gpu_name(driver: Any, number: int) -> str:
    """Name and arch of a GPU; 75 and 76 are CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR (cuda.h)."""
    device, name = ctypes.c_int(), ctypes.create_string_buffer(100)
    driver.cuDeviceGet(ctypes.byref(device), number)
    driver.cuDeviceGetName(name, len(name), device)
    arch = ""
    for attribute in (75, 76):
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        arch += str(value.value)
    return f"{name.value.decode(errors='replace')} (sm_{arch})"


def _trial_run() -> Check:
    """Plan, compile and call a model of two operators on this CPU."""
    import numpy as np

    from .. import compile as compile_module
    from ..compat import relax

    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 8), "float32"))
    with builder.function("main", [x], {"num_input": 1}):
        with builder.dataflow():
            total = builder.emit(relax.op.add(x, x))
            out = builder.emit_output(relax.op.nn.relu(total))
        builder.emit_func_output(out)
    model = compile_module(builder.get(), "llvm")
    value = np.linspace(-1, 1, 32, dtype="float32").reshape(4, 8)
    if not np.array_equal(model(value)[0], np.maximum(value + value, 0)):
        return Check(
            "trial run", "wrong", "a compiled model computes something else", "please report this"
        )
    totals = model.plan.totals
    return Check("trial run", "ok", f"two operators in {totals.launches_after} kernel, right")
