"""Schedule templates from outside this package, on their way to the processes that build candidates.

Those processes start afresh and know the package's own templates only. What a program or a notebook registered is sent
by value (cloudpickle, which TVM needs anyway), so it need not be in a file that they could import.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import tempfile
from pathlib import Path

import cloudpickle

from ..errors import TuningError
from ..schedules import registry
from ..schedules.base import ScheduleTemplate


def write_added(folder: Path) -> Path | None:
    """Write the templates that were added, unless they are there, and return the file; None where there are none.

    Raises
    ------
    TuningError
        If one cannot be sent.
    """
    added = registry.added()
    if not added:
        return None
    values = [_by_value(template) for template, _ in added]
    content = pickle.dumps((sys.path, values, [following for _, following in added]))
    path = folder / f"templates-{hashlib.sha256(content).hexdigest()[:16]}.pickle"
    if not path.exists():
        with tempfile.NamedTemporaryFile("wb", dir=folder, suffix=".part", delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    return path


def read_added(path: Path | None) -> None:
    """Register what `write_added` wrote, instead of what was registered so before."""
    if path is None:
        registry.set_added([])
        return
    places, values, followings = pickle.loads(path.read_bytes())
    # What a template imports may be beside the program that registered it.
    sys.path += [place for place in places if place not in sys.path]
    registry.set_added(list(zip(map(pickle.loads, values), followings, strict=True)))


def _by_value(template: ScheduleTemplate) -> bytes:
    """A template with the code of its module."""
    module = sys.modules.get(type(template).__module__)
    is_file = module is not None and module.__name__ != "__main__"
    try:
        if is_file:
            cloudpickle.register_pickle_by_value(module)
        try:
            return cloudpickle.dumps(template)
        finally:
            if is_file:
                cloudpickle.unregister_pickle_by_value(module)
    except (pickle.PicklingError, TypeError, ValueError) as error:
        raise TuningError(
            f"schedule template {template.name!r} cannot be sent to the processes that build candidates: {error}; keep "
            "what cannot be pickled out of it and of the globals that it reads"
        ) from error
