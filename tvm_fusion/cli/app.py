"""The program: its commands, and the one place where errors become a line and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import traceback
import warnings
from typing import Annotated

import typer

from .._version import __version__
from ..errors import FusionError
from .bench import bench
from .command import ExitCode, register
from .compile import compile_model
from .db import export_records, list_records, merge_records, prune_records, report_records
from .doctor import doctor
from .explain import explain
from .plan import plan
from .run import run_model
from .tune import tune_model
from .verify import verify

# Newer releases of typer carry their own copy of click, so click's base error (whose place in
# the chain BadParameter -> UsageError -> ClickException is the same in all) is taken from there.
CommandLineError = typer.BadParameter.__mro__[2]

#: Exit code after Ctrl-C or SIGTERM.
_INTERRUPTED = 130

#: What to do about an error of the system, by its number.
_ADVICE = {
    errno.ENOENT: "check the name",
    errno.EISDIR: "name a file in it",
    errno.ENOTDIR: "a part of that path is a file; name another",
    errno.EEXIST: "name another",
    errno.EACCES: "change its permissions, or name another",
    errno.EPERM: "change its permissions, or name another",
    errno.EROFS: "name a place that can be written to",
    errno.ENOSPC: "make room, or name a place on another disk",
}

app = typer.Typer(
    name="tvm-fusion",
    help="Operator fusion for models compiled with Apache TVM: plan it, explain it, tune it, compile it, verify it.",
    epilog="Exit codes: 0 fine, 1 verification failed, 2 bad usage or bad input, 130 interrupted.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
for function in (plan, explain, compile_model, run_model, verify, bench, tune_model, doctor):
    register(app, function)
database = typer.Typer(name="db", help="List, show, merge, export and prune the records of tuning.")
for function in (list_records, report_records, merge_records, export_records, prune_records):
    register(database, function)
app.add_typer(database)


@app.callback(invoke_without_command=True)
def program(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Show the version, or the help when no command is given."""
    if version:
        print(__version__)
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


def run(arguments: list[str]) -> int:
    """Run one command; return its exit code and never raise an ``Exception``.

    Parameters
    ----------
    arguments : list of str
        The command line without the program's name. ``--debug`` anywhere in it adds tracebacks.

    Returns
    -------
    int
        Exit code.
    """
    warnings.showwarning = _show_warning
    try:
        code = app(arguments, prog_name="tvm-fusion", standalone_mode=False)
        sys.stdout.flush()
        if code == _INTERRUPTED and not isinstance(code, ExitCode):
            # Before a command began; typer makes an exit of it without a word.
            return _report("interrupted", code=_INTERRUPTED)
        return int(code) if isinstance(code, int) else 0
    except BrokenPipeError:
        # The reader (as in "| head") has gone; Python must not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (KeyboardInterrupt, typer.Abort):
        return _report("interrupted", code=_INTERRUPTED)
    except CommandLineError as error:
        return _report(f"{_usage(error.format_message())} Try: tvm-fusion {_command(error)}--help")
    except Exception as error:  # noqa: BLE001 - the boundary: a user never sees a traceback
        if "--debug" in arguments:
            traceback.print_exc()
        return _report(_sentence(error))


def _command(error: typer.BadParameter) -> str:
    """Name of the command whose arguments are wrong, followed by a space, or nothing."""
    context, names = getattr(error, "ctx", None), ""
    while context is not None and context.parent:
        context, names = context.parent, f"{context.info_name} {names}"
    return names


def _usage(text: str) -> str:
    """What typer says of an argument, as a sentence; releases differ in marks and in whose words they pass on."""
    text = text.strip().replace("Value error, ", "")
    return text if text[-1:] in (".", "?", "!") else f"{text}."


def _sentence(error: Exception) -> str:
    """Say an error in one line."""
    if isinstance(error, OSError) and error.filename is not None:
        advice = _ADVICE.get(error.errno)
        return f"{error.strerror}: {error.filename}{f'; {advice}' if advice else ''}"
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if isinstance(error, FusionError | ValueError | OSError | ImportError):
        return text
    return f"internal error ({type(error).__name__}): {text}; --debug shows where"


def _show_warning(message: Warning | str, *_: object) -> None:
    """Show a warning as errors are shown, without the line of source that raised it."""
    _report(f"warning: {message}")


def _report(message: str, code: int = 2) -> int:
    print(f"tvm-fusion: {' '.join(message.split())}", file=sys.stderr)
    return code
