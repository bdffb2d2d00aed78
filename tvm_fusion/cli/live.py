"""Shows a tuning run on stderr: a live table on a terminal, else a line now and then; stops it on Ctrl-C or SIGTERM."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

if TYPE_CHECKING:
    from ..tuning.overview import Overview
    from ..tuning.session import Session

#: Least seconds between two lines of a log.
LOG_SECONDS = 10.0

#: Lines of a terminal that are not kernels.
_OTHER_LINES = 7

_STOPPING = "stopping when what is under way is done; Ctrl-C again stops at once"


class TuningDisplay:
    """Follows a run; an instance is the ``report`` of ``tune_model``.

    Parameters
    ----------
    console : Console
        Where to show it.
    log_seconds : float
        Least time between two lines where the console is no terminal.

    Attributes
    ----------
    session : Session or None
        The run, from its first report on.
    state : Overview or None
        What was known at the last report.
    """

    def __init__(self, console: Console, log_seconds: float = LOG_SECONDS) -> None:
        self.session: Session | None = None
        self.state: Overview | None = None
        self._console, self._log_seconds = console, log_seconds
        self._started = time.monotonic()
        self._logged = -log_seconds
        self._last = ""
        self._stopping = False

    def __call__(self, session: Session) -> None:
        """Note how the run stands."""
        from ..tuning.overview import overview

        self.session = session
        if self._stopping:
            session.tuner.stopping = True
        self.state = overview(session, self._seconds())
        if not self._console.is_terminal and self._seconds() - self._logged >= self._log_seconds:
            self.log()

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def log(self) -> None:
        """Write a line about what is known, unless it is written or there is a table."""
        from ..report.tuning_text import progress_line

        if self.state is None or not self.state.kernels or self._console.is_terminal:
            return
        line, self._logged = progress_line(self.state), self._seconds()
        if line != self._last:
            self._console.print(line, soft_wrap=True, markup=False, highlight=False)
        self._last = line

    def stop(self) -> None:
        """Let the run end with what is under way; called by a signal handler."""
        self._stopping = True
        if self.session is not None:
            self.session.tuner.stopping = True
        if not self._console.is_terminal:
            # Not through the console: its lock may be held by what was interrupted.
            os.write(2, f"tvm-fusion: {_STOPPING}\n".encode())

    def render(self) -> RenderableType:
        """What a terminal shows now."""
        from ..report.tuning_text import progress_table

        note = _STOPPING if self._stopping else ""
        if self.session is not None and self.session.finished and not note:
            note = "timing the whole model …"
        if self.state is None or not self.state.kernels:
            return Text(note or "finding groups and their kernels …")
        state = dataclasses.replace(self.state, seconds=self._seconds())
        return progress_table(state, self._console.size.height - _OTHER_LINES, note)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Show the run inside a ``with``; the first Ctrl-C or SIGTERM there stops it, the second is as usual."""
        with _first_interrupt(self.stop):
            if not self._console.is_terminal:
                yield
                return
            with Live(
                get_renderable=self.render, console=self._console, refresh_per_second=2,
                vertical_overflow="crop",
            ):  # fmt: skip
                yield


@contextlib.contextmanager
def _first_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Call a function on the first SIGINT or SIGTERM instead of what it usually does."""
    before: dict[int, Any] = {}

    def usual() -> None:
        while before:
            signal.signal(*before.popitem())

    def handle(number: int, frame: types.FrameType | None) -> None:
        usual()
        stop()

    # Handlers belong to the main thread; a job that ignores SIGINT (behind "&" in a script) goes on doing so.
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        usual()
