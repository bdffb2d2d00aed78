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
        0 if all is well, 1 if a verification failed, 2 for bad usage or bad input.
    """
    import sys

    from .app import run

    return run(sys.argv[1:] if arguments is None else list(arguments))
