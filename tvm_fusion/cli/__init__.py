"""The command line ``tvm-fusion``; TVM is imported only when a command needs it."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Arguments without the program's name; those of this process by default.

    Returns
    -------
    int
        0 if all is well, 1 if a verification failed, 2 for bad usage or bad input, 130 if it was
        interrupted by Ctrl-C or SIGTERM.
    """
    import sys

    _interrupt_on_signals()
    try:
        from .app import run

        return run(sys.argv[1:] if arguments is None else list(arguments))
    except KeyboardInterrupt:  # while modules are imported; commands deal with theirs
        print("tvm-fusion: interrupted", file=sys.stderr)
        return 130


class _Interrupted(KeyboardInterrupt):
    """What both signals raise: Python up to 3.11 ends with code -2 if a plain one ever left an ``exec`` of text.

    Such an ``exec`` is in every import of a dataclass; that the exception was dealt with since does not matter to it.
    """


def _interrupt_on_signals() -> None:
    """Let SIGTERM do what Ctrl-C does: clean up, end what was started, and say so in a line."""
    import signal
    import threading

    def interrupt(*_):
        raise _Interrupted

    if threading.current_thread() is not threading.main_thread():
        return
    # Who runs a command inside a program of his own, or ignores a signal, has said what it does.
    usual = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    for number, handler in usual.items():
        if signal.getsignal(number) is handler:
            signal.signal(number, interrupt)
