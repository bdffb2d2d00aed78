"""What commands show and write: progress on a terminal, files whose errors name them, outputs that spoil nothing."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path

#: Columns of the tables in a file or a pipe.
PIPE_WIDTH = 160


@contextlib.contextmanager
def stage(text: str) -> Iterator[Callable[[int, int], None]]:
    """Show that a step is running, on stderr and only on a terminal.

    Parameters
    ----------
    text : str
        What is being done.

    Yields
    ------
    callable
        ``progress(done, total)``, to be called by steps that know how far they are.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as display:
        task = display.add_task(text, total=None)
        yield lambda done, total: display.update(task, completed=done, total=total)


def write_text(file: Path, text: str) -> None:
    """Write a text file; an error names it (that of a full disk would not)."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error


def check_output(output: Path, model: Path) -> None:
    """Refuse an output that cannot be a new file, or would be one of tuning's, before any work is done."""
    from ..tuning.work_dir import folder_of_records

    folder = output.absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "No such folder", str(folder))
    if output.is_dir():
        raise ValueError(f"{output} is a folder; name the file to write")
    if output.exists() and model.exists() and output.samefile(model):
        raise ValueError(f"{output} is the model itself; name another file with -o")
    records = folder_of_records(output)
    if records is not None:
        raise ValueError(f"{output} is among the records in {records}; name a file elsewhere")
