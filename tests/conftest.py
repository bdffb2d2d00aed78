"""Options, markers and skips shared by all tests."""

from __future__ import annotations

import functools
import importlib.util
import os
import zlib

import pytest
from hypothesis import settings

from tvm_fusion.testing import relay_environment

# A loaded machine makes any one example slow; slowness is no failure here.
settings.register_profile("tvm_fusion", deadline=None, print_blob=True)
settings.load_profile("tvm_fusion")

#: Slow tests that are many. Of kernels any part covers every template; the others are mutations of models, PyTorch's
#: operators and networks, one after the other.
_MANY = (
    "tests/schedules/",
    "tests/transform/test_lower_groups.py",
    "tests/build/test_emulated_bounds.py",
    "tests/build/test_emulated_plans.py",
    "tests/frontend/relay/",
    "tests/frontend/test_onnx_fuzz.py",
    "tests/frontend/test_onnx_random.py",
    "tests/frontend/test_torch_opdb.py",
    "tests/models/test_light_models.py",
    "tests/models/test_torch_zoo.py",
    "tests/relay/",
)

MARKERS = {
    "slow": "takes long; runs with --slow only",
    "nvcc": "compiles CUDA code; skipped where there is no nvcc",
    "torch": "needs PyTorch; skipped where it is not installed",
    "gpu": "needs a CUDA device; skipped where there is none",
    "relay": "runs in an environment with a TVM that has Relay (make relay-env); skipped where there is none",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--slow`` and ``--slow-part``."""
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption(
        "--slow-part",
        default="1/1",
        metavar="K/N",
        help="of the slow tests that are many only the Kth of N parts (by a checksum of their names)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers; fail early where nvcc is promised but missing."""
    for name, text in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {text}")
    if os.environ.get("TVM_FUSION_REQUIRE_NVCC") == "1" and not _has_nvcc():
        raise pytest.UsageError("TVM_FUSION_REQUIRE_NVCC=1 is set, but there is no nvcc")


@pytest.hookimpl(tryfirst=True)  # before -m selects by the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine or command line leaves out, saying why."""
    for item in items:
        # A module that skips itself without PyTorch would run in no part of .ci/run if it were not marked.
        if "torch" in item.fixturenames or hasattr(item.module, "torch"):
            item.add_marker("torch")
        marks = {mark.name for mark in item.iter_markers()}
        for name, reason in _reasons(config, marks).items():
            item.add_marker(pytest.mark.skip(reason=f"{name}: {reason}"))
        if "slow" in marks and item.nodeid.startswith(_MANY) and not _in_part(config, item.nodeid):
            item.add_marker(pytest.mark.skip(reason="slow: in another part (--slow-part)"))


def _in_part(config: pytest.Config, name: str) -> bool:
    """Whether one of the slow tests that are many belongs to the part that is asked for."""
    part, parts = map(int, config.getoption("--slow-part").split("/"))
    return zlib.crc32(name.encode()) % parts == part % parts


def _reasons(config: pytest.Config, marks: set[str]) -> dict[str, str]:
    """Return why a test with these marks cannot run here."""
    reasons = {}
    if "slow" in marks and not config.getoption("--slow"):
        reasons["slow"] = "runs with --slow (make test-full)"
    if "nvcc" in marks and not _has_nvcc():
        reasons["nvcc"] = "not found; install CUDA or the package's cuda extra"
    if "torch" in marks and importlib.util.find_spec("torch") is None:
        reasons["torch"] = "PyTorch is not installed; install the package's torch extra"
    if "relay" in marks and relay_environment.python_of() is None:
        reasons["relay"] = relay_environment.missing()
    if "gpu" in marks and not _has_gpu():
        reasons["gpu"] = "this machine has no CUDA device"
    return reasons


@functools.cache
def _has_nvcc() -> bool:
    # Imported here, as TVM is below: most runs need neither.
    from tvm_fusion.build.ptxas import find_nvcc
    from tvm_fusion.errors import CompilerError

    try:
        folder = os.path.dirname(find_nvcc())
    except CompilerError:
        return False
    # For tests that call nvcc by its name, and for TVM, which looks on PATH first.
    os.environ["PATH"] = os.pathsep.join([folder, os.environ["PATH"]])
    return True


@functools.cache
def _has_gpu() -> bool:
    import tvm

    return bool(tvm.cuda(0).exist)
