"""``tvm-fusion tune``: measure kernels and how deep to fuse, on this machine or on others."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..tuning.allocation import TRIALS
from .options import ModelOptions, option
from .output import check_output, stage, write_text
from .plan import format_of, plan_text

if TYPE_CHECKING:
    from ..compat import Target, tvm
    from ..tuning.tune import Remote, Tuned
    from ..tuning.whole import WholeTimes
    from .live import TuningDisplay

#: Exit code of a run that Ctrl-C ended, as of a shell's.
INTERRUPTED = 130


def tune_model(
    options: ModelOptions,
    work_dir: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Where every trial is kept; a run that was stopped goes on there."
        ),
    ],
    trials: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Trials over all kernels; those of earlier runs count."
        ),
    ] = TRIALS,
    minutes: Annotated[
        float | None,
        typer.Option(metavar="M", help="When to stop at the latest (default: no limit)."),
    ] = None,
    runner: Annotated[
        Literal["local"] | None,
        typer.Option(help="Measure on this machine, which is the default without --rpc."),
    ] = None,
    rpc: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Measure on the servers of this TVM RPC tracker."),
    ] = None,
    key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Key of the servers at the tracker.")
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="N,N...",
            help="GPUs of this machine that measure, all alike, as 0,1 (default: GPU 0).",
        ),
    ] = None,
    require_cached: Annotated[
        bool,
        typer.Option(
            "--require-cached", help="Measure nothing; fail if something would have to be."
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write the plan to this file (*.json, *.html, else text)."
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page about the run to this file."),
    ] = None,
) -> int:
    """Find the fastest kernels of a model, and how deep to fuse, by measuring.

    Examples
    --------
    tvm-fusion tune resnet50.onnx --work-dir tuned --target cuda --dtype float16
    tvm-fusion tune resnet50.onnx --work-dir tuned --minutes 10 -o plan.json --html tuning.html
    tvm-fusion tune resnet50.onnx --work-dir tuned --target cuda --devices 0,1
    tvm-fusion tune resnet50.onnx --work-dir tuned --target cuda:sm_90a --rpc tracker:9190 --key h200
    """
    remote, numbers = _remote(rpc, key, runner), _devices(devices, rpc)
    if minutes is not None and not minutes > 0:
        raise ValueError(f"--minutes must be above 0, not {minutes:g}")
    _check_files(options.model, work_dir, output, html)
    from ..api import resolve

    config, target = options.config(), options.parsed_target()
    target, module = resolve(options.load(), target, config)
    found = _tune(
        module, target, work_dir, config=config, trials=trials, minutes=minutes, remote=remote,
        devices=numbers, require_cached=require_cached, name=options.name,
    )  # fmt: skip
    print(_summary(options.name, found, trials, require_cached))
    if output is not None:
        write_text(output, plan_text(found.plan, module, format_of(output)) + "\n")
        print(f"wrote {output}")
    if html is not None:
        _write_page(html, work_dir, module, target, options.name)
        print(f"wrote {html}")
    print(_next_steps(options, work_dir, output, found))
    return INTERRUPTED if found.stopped else 0


def _remote(rpc: str | None, key: str | None, runner: str | None) -> Remote | None:
    """Where to measure, from three options."""
    if rpc is None:
        if key is not None:
            raise ValueError("--key goes with --rpc HOST:PORT, which is missing")
        return None
    if runner is not None:
        raise ValueError("--rpc and --runner local exclude each other; leave one out")
    if key is None:
        raise ValueError("--rpc needs --key KEY, the key of the servers at the tracker")
    host, _, port = rpc.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"--rpc {rpc!r} is not of the form HOST:PORT, as tracker:9190")
    from ..tuning.tune import Remote

    return Remote(host.strip("[]"), int(port), key)


def _devices(devices: str | None, rpc: str | None) -> list[int] | None:
    """Numbers of GPUs, from an option."""
    if devices is None:
        return None
    if rpc is not None:
        raise ValueError("--rpc and --devices exclude each other; leave one out")
    words = devices.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ValueError(f"--devices {devices!r} is not a list of numbers, as 0,1")
    return [int(word) for word in words]


def _check_files(model: Path, work_dir: Path, output: Path | None, html: Path | None) -> None:
    """Refuse files that cannot be written, before any work is done."""
    for file in (output, html):
        if file is not None:
            check_output(file, model)
            if file.resolve() == work_dir.resolve():
                raise ValueError(f"{file} is the work dir; name another file")
    if output is not None and html is not None and output.absolute() == html.absolute():
        raise ValueError("--output and --html name the same file; give them two names")
    if work_dir.exists() and not work_dir.is_dir():
        raise ValueError(f"--work-dir {work_dir} is a file; name a folder")


def _tune(module: tvm.IRModule, target: Target, work_dir: Path, **settings: object) -> Tuned:
    """Tune with a display; the second Ctrl-C leaves the plan of the moment."""
    from rich.console import Console

    from ..tuning.tune import Tuned, tune_model
    from .live import TuningDisplay

    if settings["require_cached"]:
        with stage("choosing from the records"):
            return tune_model(module, target, work_dir, **settings)
    display = TuningDisplay(Console(stderr=True))
    try:
        with display.shown():
            found = tune_model(module, target, work_dir, report=display, **settings)
    except KeyboardInterrupt:
        session = display.session
        if session is None or session.plan is None:
            raise
        found = Tuned(session.plan, None, session.tuner.trials, stopped=True)
    display.log()
    _warn_of_disk(display)
    return found


def _warn_of_disk(display: TuningDisplay) -> None:
    problem = display.session.tuner.disk_problem if display.session is not None else ""
    if problem:
        print(f"tvm-fusion: warning: not everything could be kept: {problem}", file=sys.stderr)


def _summary(name: str, found: Tuned, trials: int, cached: bool) -> str:
    """What came of it, in a few lines."""
    t, whole = found.plan.totals, found.whole
    groups = len(found.plan.groups)
    how = "on record" if cached else f"of {trials}"
    state = "stopped, the best so far" if found.stopped else "tuned"
    first = f"{name}: {state}: {found.trials} trials {how}, {groups} group{'s' * (groups != 1)}"
    if found.shipped != "default":  # how many kernels TVM makes is not known
        first += f", {t.launches_before} kernel launches unfused, {t.launches_after} fused"
    lines = [first]
    if whole is not None:
        lines += _times(whole, found.shipped)
    if found.shipped == "unfused":
        lines.append("the groups did not make the whole model faster, so the plan has none")
    if found.shipped == "untuned":
        lines.append(
            "what was tuned did not make the whole model faster, so the plan is the untuned one, and compile "
            "--work-dir builds its kernels as without the work dir"
        )
    if found.shipped == "default":
        lines.append(
            "TVM's default pipeline was faster than any plan, so the model is compiled by it"
        )
    return "\n".join(lines)


def _times(whole: WholeTimes, shipped: str) -> Iterator[str]:
    """The whole model's times, and why what was tuned stays where it is not the fastest."""
    from ..report.tuning_text import gain_text, time_text

    sides = {
        "tuned": whole.tuned_us, "untuned": whole.untuned_us, "unfused": whole.unfused_us,
        "TVM's default": whole.default_us,
    }  # fmt: skip
    if whole.untuned_us is None:
        del sides["untuned"]
    compiled = whole.of(shipped)
    times = (f"{n} {time_text(us) if us is not None else 'not usable'}" for n, us in sides.items())
    gains = {name: gain_text(us, compiled) for name, us in sides.items() if us != compiled}
    told = [f"{gain} against {name}" for name, gain in gains.items() if gain]
    yield f"whole model, µs: {', '.join(times)}" + (f" (time {', '.join(told)})" if told else "")
    if shipped != "tuned":
        return
    if whole.tuned_us > whole.unfused_us:
        yield (
            f"with its groups the whole model is slower by less than the noise (±{200 * whole.noise:.0f} %), and each "
            "group was measured faster than its parts: they stay"
        )
    if whole.untuned_us is not None and whole.tuned_us > whole.untuned_us:
        yield (
            "tuned the whole model is slower than untuned by less than the noise "
            f"(±{200 * whole.untuned_noise:.0f} %), and no kernel was measured slower: what was tuned stays"
        )


def _write_page(
    file: Path, work_dir: Path, module: tvm.IRModule, target: Target, name: str
) -> None:
    from ..report import render_tuning
    from ..tuning.lookup import policy_of
    from ..tuning.work_dir import WorkDir, record_arch

    place = WorkDir(work_dir).place(record_arch(target.attrs), policy_of(module, target))
    write_text(file, render_tuning([place], model=name) + "\n")


def _next_steps(options: ModelOptions, work_dir: Path, output: Path | None, found: Tuned) -> str:
    """Commands that go on from here."""
    words = ["tvm-fusion", "compile", str(options.model), "--work-dir", str(work_dir)]
    if output is not None and format_of(output) == "json":
        words += ["--plan", str(output)]  # it holds what options of planning said
    else:
        words += _given(options)
    words += [] if options.target == "llvm" else ["--target", options.target]
    words += [] if options.dtype is None else ["--dtype", options.dtype]
    words += [word for shape in options.shape or [] for word in ("--shape", shape)]
    words += [] if options.params is None else ["--params", str(options.params)]
    lines = [f"compile it: {shlex.join([*words, '-o', f'{options.name}.so'])}"]
    if found.stopped:
        lines.insert(0, "go on: the same command again; trials on record are not repeated")
    return "\n".join(lines)


def _given(options: ModelOptions) -> list[str]:
    """The options of planning that the user gave, as words of a command line."""
    words = []
    for name, value in options.given().items():
        for one in value if isinstance(value, list) else [value]:
            words += [option(name), str(one)]
    return words
