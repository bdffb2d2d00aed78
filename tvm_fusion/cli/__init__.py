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

    _interrupt_on_termination()
    try:
        from .app import run

        return run(sys.argv[1:] if arguments is None else list(arguments))
    except KeyboardInterrupt:  # while modules are imported; commands deal with theirs
        print("tvm-fusion: interrupted", file=sys.stderr)
        return 130


def _interrupt_on_termination() -> None:
    """Let SIGTERM do what Ctrl-C does: clean up, end what was started, and say so in a line."""
    import signal
    import threading

    main = threading.current_thread() is threading.main_thread()
    # Who runs a command inside a program of his own, or ignores the signal, has said what it does.
    if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
