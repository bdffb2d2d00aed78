"""The child process that reads an untrusted JSON module before the user's process does."""

from __future__ import annotations

from typing import Any

from .child import serve


def main() -> None:
    """Serve one request: the JSON text as data, no answer but success or the error."""
    serve(_step)


def _step(request: dict[str, Any], data: bytes) -> bytes:
    from .relax import from_relax, read_json

    from_relax(read_json(data.decode()))
    return b""
