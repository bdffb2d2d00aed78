"""Without a C++ compiler a library is refused in words, and where TVM looks for CUDA nothing is in the way."""

from __future__ import annotations

import pytest

from tvm_fusion.build import ptxas
from tvm_fusion.build.library import export_library, find_linker
from tvm_fusion.compat import tvm
from tvm_fusion.errors import CompilerError


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """An environment without programs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CXX", "CC", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_the_first_compiler_on_path_links(bare, monkeypatch):
    for name in ("clang++", "gcc"):
        (bare / name).touch(mode=0o755)
    assert find_linker() == str(bare / "gcc")
    monkeypatch.setenv("CXX", "clang++")
    assert find_linker() == str(bare / "clang++")


def test_a_library_without_a_compiler_is_refused_and_leaves_nothing(bare):
    with pytest.raises(CompilerError, match=r"there is none on PATH; install g\+\+"):
        export_library(None, bare / "m.so")
    assert not list(bare.iterdir())


def test_cuda_is_looked_for_without_the_program_which(bare, monkeypatch):
    """TVM's own search calls it, and a slim container has none."""

    def without_which():
        raise FileNotFoundError(2, "No such file or directory", "which")

    monkeypatch.setattr(tvm.support.nvcc, "find_cuda_path", without_which)
    monkeypatch.setattr(ptxas.importlib.util, "find_spec", lambda name: None)
    assert not ptxas.has_nvcc()
    with pytest.raises(CompilerError, match="nvcc is not installed"):
        ptxas.find_nvcc()
