"""Corrections of the templates' cost models as a file: ``model.json`` beside the trials, one entry for each device."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DatabaseError
from .refit import Correction, Row, refit
from .trials import Trial, parse_line, trial_digest

if TYPE_CHECKING:
    from .cost_model import Candidate
    from .work_dir import Records

#: Version of the file's format. A file of another one is left alone.
SCHEMA = 1

NAME = "model.json"


def rows_of(trials: Iterable[Trial]) -> list[Row]:
    """What can be fitted: right trials whose prediction is on record."""
    return [
        Row(t.kernel, t.template, t.decision, t.predicted_us, t.microseconds)
        for t in trials
        if t.verdict == "ok" and t.predicted_us is not None
    ]


def load_models(folder: Path) -> dict[str, dict[str, Correction]]:
    """Read corrections.

    Parameters
    ----------
    folder : Path
        The folder of the trials.

    Returns
    -------
    dict of str to dict of str to Correction
        By device and template; empty where there is no file. One that is damaged, or of another version, is ignored
        with a warning.
    """
    path = folder / NAME
    try:
        return _parsed(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        warnings.warn(f"{path} is ignored: {why}; tuning writes it anew", stacklevel=2)
        return {}


def _parsed(text: bytes) -> dict[str, dict[str, Correction]]:
    content = parse_line(text)
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"not of format {SCHEMA}")
    devices = content.get("devices")
    if not isinstance(devices, dict):
        raise ValueError("no devices")
    found: dict[str, dict[str, Correction]] = {}
    for device, models in devices.items():
        if not isinstance(models, list):
            raise ValueError("no models")
        made = [Correction.from_dict(fields) for fields in models]
        found[device] = {correction.template: correction for correction in made}
    return found


def save_models(folder: Path, device: str, models: Mapping[str, Correction]) -> None:
    """Write the corrections of one device, those of others kept.

    Raises
    ------
    DatabaseError
        If the file cannot be written; what was there stays.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whatever cannot be read is replaced
        known = load_models(folder)
    known[device] = dict(models)
    devices: dict[str, Any] = {
        name: [correction.to_dict() for _, correction in sorted(found.items())]
        for name, found in sorted(known.items())
        if found
    }
    text = json.dumps({"schema": SCHEMA, "devices": devices}, indent=1) + "\n"
    path, fresh = folder / NAME, folder / f".{NAME}.{os.getpid()}"
    try:
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, path)
    except OSError as error:
        raise DatabaseError(f"cannot write {path}: {error.strerror}") from error
    finally:
        fresh.unlink(missing_ok=True)


def models_of(records: Records, device: str) -> dict[str, Correction]:
    """Corrections for a device: those of the last run, else what its trials give."""
    known = load_models(records.folder).get(device)
    if known is not None:
        return known
    return refit(rows_of(trial for trial in records if trial.device == device))


def refitted(
    records: Records, device: str, measured: Iterable[tuple[str, Candidate, float]]
) -> dict[str, Correction]:
    """Corrections from all trials of a device.

    Parameters
    ----------
    records : Records
        Trials, each with what was predicted when it was tried.
    device : str
        Whose trials count.
    measured : iterable of (str, Candidate, float)
        Kernel, candidate and microseconds of right trials whose prediction is of today.
    """
    rows = {
        trial_digest(kernel, c.template, c.decision): Row(
            kernel, c.template, c.decision, c.predicted_us, time
        )
        for kernel, c, time in measured
    }
    others = [t for t in records if t.device == device and t.trial not in rows]
    return refit([*rows.values(), *rows_of(others)])
