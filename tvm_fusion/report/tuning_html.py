"""What was tuned as one self-contained HTML page, from a work dir alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2

from .._version import __version__
from ..errors import DatabaseError
from ..tuning.summary import load_summaries
from ..tuning.work_dir import Place
from . import words
from .curves import HEIGHT, MARGIN, WIDTH
from .tuning_page import MAX_CURVES, ModelPage, model_page
from .tuning_text import time_text

_TEMPLATES = Path(__file__).resolve().parent / "templates"


def render_tuning(places: Sequence[Place], *, model: str | None = None) -> str:
    """Return a page about what tuning has found.

    Parameters
    ----------
    places : sequence of Place
        Folders of records.
    model : str, optional
        Only this model. Without it: every model, and the kernels of folders where no run of a model
        is on record.

    Returns
    -------
    str
        A page that works from a file, on paper and without scripts: the whole model tuned, unfused and
        by TVM's default pipeline, each kernel with its best-so-far curve, fusion depth against latency
        for each chain, and what was rejected. Names are escaped.

    Raises
    ------
    DatabaseError
        If a file cannot be read, or no run of the model, or nothing at all, is on record.
    """
    pages = [page for place in places for page in _pages(place, model)]
    if not pages and model is not None:
        raise DatabaseError(f"no run of a model {model!r} is on record there; leave --model out")
    if not pages:
        raise DatabaseError(
            "no trials are on record there yet; tvm-fusion tune --work-dir makes them"
        )
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters.update(us=time_text, span=words.span)
    return environment.get_template("tuning.html.j2").render(
        pages=pages, version=__version__, letters=words.LETTERS, max_curves=MAX_CURVES,
        plot={"width": WIDTH, "height": HEIGHT, "margin": MARGIN},
    )  # fmt: skip


def _pages(place: Place, model: str | None) -> list[ModelPage]:
    """The pages of one folder."""
    trials = place.records()
    summaries = [s for s in load_summaries(place.folder) if model in (None, s.model)]
    if summaries:
        return [model_page(summary, trials, "", place.dtype_policy) for summary in summaries]
    if model is not None or not len(trials):
        return []
    return [model_page(None, trials, place.folder.name, place.dtype_policy)]
