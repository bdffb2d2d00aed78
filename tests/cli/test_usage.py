"""The program around the commands: help, exit codes, errors as one line, a light start."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import warnings

import pytest

from tvm_fusion import config
from tvm_fusion.cli import app as program
from tvm_fusion.cli import main
from tvm_fusion.cli.options import ModelOptions, option, parse_shapes
from tvm_fusion.cli.output import stage
from tvm_fusion.errors import TargetError

COMMANDS = ["plan", "explain", "compile", "run", "verify", "bench"]


def error_line(capsys) -> str:
    """The only line on stderr; nothing is on stdout."""
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("tvm-fusion: ")
    return lines[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command: str, capsys) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"tvm-fusion {command} resnet50" in text
    assert "--debug" in text


def test_help_lists_the_commands(capsys) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in [*COMMANDS, "tune", "db", "doctor"])
    assert "Exit codes: 0 fine, 1 verification failed, 2 bad usage" in text


def test_no_command_shows_the_help(capsys) -> None:
    assert main([]) == 2
    assert "Usage: tvm-fusion" in capsys.readouterr().out


def test_version(capsys) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.count(".") == 2


def test_help_imports_no_tvm_and_is_fast() -> None:
    code = (
        "import sys; from tvm_fusion.cli import main; code = main(['--help']); "
        "heavy = {'tvm', 'tvm_ffi', 'numpy', 'onnx', 'torch'} & set(sys.modules); "
        "sys.exit(f'imports {heavy}' if heavy else code)"
    )
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0, done.stderr
    # About 0.2 s of the processor's time, the best of three: a busy machine does not decide.
    assert min(times) < 1.0


def test_module_and_program_are_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tvm_fusion.cli", "no-such"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == "tvm-fusion: No such command 'no-such'. Try: tvm-fusion --help\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such"], "No such command 'no-such'"),
        (["plan"], "Missing argument 'MODEL'. Try: tvm-fusion plan --help"),
        (["plan", "m.onnx", "--no-such"], "No such option"),
        (["plan", "m.onnx", "--dtype", "int8"], "'--dtype'"),
        (["plan", "m.onnx", "--format", "xml"], "'--format'"),
        (["plan", "m.onnx", "--max-depth", "many"], "'--max-depth'"),
        (["plan", "m.onnx", "--balance", "tilt"], "'--balance'"),
        (["plan", "m.onnx", "--preset", "rnn"], "'--preset'"),
        (["explain", "m.onnx", "--format", "html"], "'--format'"),
        (["run", "m.so", "--seed", "-1"], "'--seed'"),
        (["verify", "m.onnx", "--seed", "-1"], "'--seed'"),
        (["bench", "m.onnx", "--seed", "-1"], "'--seed'"),
        (["compile", "m.onnx"], "Missing option '--output'"),
        (
            ["compile", "m.onnx", "-o", "m.so", "--plan", "no-such.json"],
            "--plan no-such.json does not exist; write it with",
        ),
        (["compile", "m.onnx", "-o", "m.so", "--plan", "."], "'.' is a directory"),
        (["compile", "m.onnx", "-o", "m.so", "--work-dir", __file__], "is a file"),
        (["run", "m.so", "-o", __file__], "is a file"),
        (["run", "."], "'.' is a folder"),
        (["plan", "."], "'.' is a folder; name a model file"),
        (["plan", "no-such"], "'no-such' does not exist"),
    ],
)
def test_bad_usage(arguments, message, capsys) -> None:
    assert main(arguments) == 2
    assert message in error_line(capsys)


@pytest.mark.parametrize(
    "arguments",
    [["plan"], ["run", "m.so", "--seed", "-1"], ["plan", "--no-such"], ["run", "a", "b"]],
)
def test_bad_usage_ends_with_the_help_to_call(arguments, capsys) -> None:
    """What is wrong is a sentence of its own, whatever the release of typer says it with."""
    assert main(arguments) == 2
    said = error_line(capsys)
    assert re.search(r"[.?!] Try: tvm-fusion (plan|run) --help$", said.strip()), said
    assert "Value error" not in said


@pytest.mark.parametrize(
    ("field", "choices"), [("balance", config.BALANCES), ("preset", config.PRESETS)]
)
def test_choices_are_those_of_the_configuration(field, choices, capsys) -> None:
    for choice in choices:
        assert getattr(ModelOptions("m.onnx", **{field: choice}).config(), field) == choice
    assert main(["plan", "m.onnx", option(field), "no-such"]) == 2
    message = error_line(capsys)
    assert all(repr(choice) in message for choice in choices)


def raising(error: BaseException):
    """A stand-in for the typer application."""

    def application(*_: object, **__: object) -> None:
        raise error

    return application


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (TargetError("no such arch"), 2, "no such arch"),
        (ValueError("first line\nsecond line"), 2, "first line"),
        (FileNotFoundError(2, "No such file or directory", "m.onnx"), 2, "m.onnx; check the name"),
        (PermissionError(13, "Permission denied", "m.so"), 2, "m.so; change its permissions"),
        (OSError(28, "No space left on device", "plan.html"), 2, "plan.html; make room"),
        (OSError(5, "Input/output error", "m.so"), 2, "Input/output error: m.so"),
        (ImportError("install onnx"), 2, "install onnx"),
        (RuntimeError("\n\nboom\n"), 2, "internal error (RuntimeError): boom; --debug shows where"),
        (KeyError("x"), 2, "internal error (KeyError): 'x'"),
        (AssertionError(), 2, "internal error (AssertionError): AssertionError"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_every_error_is_one_line(error, code, message, capsys, monkeypatch) -> None:
    monkeypatch.setattr(program, "app", raising(error))
    assert program.run([]) == code
    assert message in error_line(capsys)


def test_warnings_are_one_line(capsys, monkeypatch) -> None:
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # put back afterwards
    monkeypatch.setattr(
        program, "app", lambda *_, **__: warnings.warn("group 3\nis left out", stacklevel=1)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert program.run([]) == 0
    assert error_line(capsys) == "tvm-fusion: warning: group 3 is left out"


def test_debug_shows_the_traceback(capsys, monkeypatch) -> None:
    monkeypatch.setattr(program, "app", raising(RuntimeError("boom")))
    assert program.run(["plan", "m.onnx", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error() -> None:
    """As in ``tvm-fusion --help | head -1``."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-u", "-m", "tvm_fusion.cli", "--help"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert done.stderr == ""


def test_shapes() -> None:
    assert parse_shapes([]) is None
    assert parse_shapes(["data=1,3,224,224", "a=b=2"]) == {"data": (1, 3, 224, 224), "a=b": (2,)}


@pytest.mark.parametrize(
    "text", ["data", "=1,2", "data=", "data=1,x", "data=1,-2", "data=0", "d=1,"]
)
def test_bad_shapes(text: str) -> None:
    with pytest.raises(ValueError, match="is not of the form NAME=1,3,224,224"):
        parse_shapes([text])


def test_a_shape_twice() -> None:
    with pytest.raises(ValueError, match="gives 'x' twice"):
        parse_shapes(["x=1", "x=2"])


def test_progress_is_silent_without_a_terminal(capsys) -> None:
    with stage("working") as progress:
        progress(1, 2)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.parametrize(
    ("named", "message"),
    [(None, "there is none on PATH; install g++"), ("/no/cxx", "/no/cxx (CXX or CC) is not there")],
)
def test_without_a_compiler_nothing_is_begun(named, message, capsys, monkeypatch, tmp_path) -> None:
    """The model is not even looked for: the work would be lost at the end."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    if named:
        monkeypatch.setenv("CXX", named)
    assert main(["compile", "m.onnx", "-o", str(tmp_path / "m.so")]) == 2
    said = error_line(capsys)
    assert "a C++ compiler links the library" in said and message in said
    assert not list(tmp_path.iterdir())
