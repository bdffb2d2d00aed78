"""What concerns Relay and can be tested without it: the environment, the error where it is missing, the options."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvm_fusion.testing import relay_environment

HERE = Path(__file__).resolve().parent


def test_an_environment_that_cannot_be_made_says_why(tmp_path, monkeypatch) -> None:
    """The reason is kept for the skipped tests, and the next attempt starts afresh."""
    monkeypatch.setenv(relay_environment.VARIABLE, str(tmp_path / "no-python"))
    folder = tmp_path / "environment"
    assert relay_environment.missing(folder) == "not made yet: run make relay-env"
    reason = relay_environment.make(folder)
    assert "no Python 3.10 is found" in reason and relay_environment.missing(folder) == reason
    assert relay_environment.python_of(folder) is None


def test_tvm_without_relay_is_named() -> None:
    with pytest.raises(ImportError, match=r"has no Relay; use tvm_fusion\.relay with a TVM up to"):
        __import__("tvm_fusion.relay")


def test_options_are_those_of_the_relax_passes() -> None:
    """Both dialects have the same passes with the same options and defaults."""
    import ast
    import inspect

    from tvm_fusion import transform

    tree = ast.parse((HERE.parent.parent / "tvm_fusion/relay/fuse.py").read_text(encoding="utf-8"))
    found = {}
    for item in tree.body:
        if isinstance(item, ast.ClassDef) and not item.name.startswith("_"):
            (init,) = [
                f for f in item.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"
            ]
            names = [a.arg for a in init.args.args]
            found[item.name] = (names, [ast.literal_eval(d) for d in init.args.defaults])
    assert set(found) == {
        "VerticalFusion",
        "HorizontalFusion",
        "CrossFusion",
        "CompoundFusion",
        "Fuse",
    }
    for name, (names, defaults) in found.items():
        twin = ast.parse(inspect.getsource(inspect.getmodule(getattr(transform, name)))).body
        (init,) = [
            f
            for item in twin
            if isinstance(item, ast.ClassDef) and item.name == name
            for f in item.body
            if isinstance(f, ast.FunctionDef) and f.name == "__init__"
        ]
        assert [a.arg for a in init.args.args] == names
        assert [ast.literal_eval(d) for d in init.args.defaults] == defaults


def _set_in(file: str, name: str) -> frozenset[str]:
    """A set of operator names that a file of tvm_fusion/relay, which cannot be imported here, spells out."""
    import ast

    tree = ast.parse((HERE.parent.parent / "tvm_fusion/relay" / file).read_text(encoding="utf-8"))
    (value,) = [
        item.value
        for item in tree.body
        if isinstance(item, ast.Assign) and getattr(item.targets[0], "id", "") == name
    ]
    return eval(compile(ast.Expression(value), file, "eval"), {"frozenset": frozenset})


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("move_reshapes", "_UNARY"),
        ("move_reshapes", "_BINARY"),
        ("move_reshapes", "_ROWS"),
        ("slice_splits", "_READERS"),
    ],
)
def test_rewrites_know_the_same_operators(file: str, name: str) -> None:
    """A rewrite of Relax and its twin of Relay stand on either side of two TVMs: their lists must not drift apart."""
    import importlib

    twin = getattr(importlib.import_module(f"tvm_fusion.frontend.canonical.{file}"), name)
    assert _set_in(f"{file}.py", name) == {op.removeprefix("nn.") for op in twin}
