"""Worker process that schedules and compiles candidates (see `builder`)."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tvm_ffi

from ..build import tir_pipeline
from ..build.cuda_source import COMPILE_HOOK, HOOK_LOCK, device_sources
from ..build.library import export_library
from ..build.machine_code import digest
from ..build.model import BUILD_ERRORS, last_line
from ..build.ptxas import arch_of, assemble, parse_report
from ..build.resources import dynamic_shared_bytes
from ..compat import Target, s_tir, tirx, tvm
from ..errors import CompilerError, LoweringError
from ..schedules import limits, registry
from ..schedules.base import PACKED
from ..schedules.decisions import Decision
from ..targets import with_variant
from .added_templates import read_added
from .measure import BuildFailure, Built, Packed
from .serve import Channel, Handler, serve

#: How ptxas says that a block's static shared memory does not fit.
_TOO_MUCH_SHARED = "too much shared data"


class BuildHandler:
    """Carries out requests of the builder; parses each kernel once."""

    def __init__(self) -> None:
        self._functions: dict[str, tirx.PrimFunc] = {}
        self._added: str | None = None

    def __call__(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Build one candidate, or find what may be decided about a kernel.

        The answer holds the fields of `Built` or of `BuildFailure`, or spaces as lists.
        """
        added = request.get("templates")
        if added != self._added:
            read_added(Path(added) if added else None)
            self._added = added
        target = Target(json.loads(request["target"]))
        func = self._function(request["kernel"], request["source"])
        if request["do"] == "spaces":
            return {"verdict": "found", "spaces": _spaces(func, target)}
        decision = tuple((name, value) for name, value in request["decision"])
        made = build(func, target, request["template"], decision, Path(request["artifact"]))
        answer = dataclasses.asdict(made)
        if isinstance(made, Built):
            answer |= {"verdict": "built", "artifact": str(made.artifact)}
        return answer

    def _function(self, kernel: str, source: str) -> tirx.PrimFunc:
        if kernel not in self._functions:
            self._functions[kernel] = load_function(Path(source).read_text(encoding="utf-8"))
        return self._functions[kernel]


def _spaces(func: tirx.PrimFunc, target: Target) -> list[Any]:
    """Search spaces as lists: template; of each point its name, options and predicted times."""
    found = registry.spaces(func, with_variant(target))
    return [[s.template, [[p.name, p.options, p.microseconds] for p in s.points]] for s in found]


def load_function(func_json: str) -> tirx.PrimFunc:
    """The function of a `KernelSource`."""
    return tvm.ir.load_json(func_json)["main"]


def schedule_candidate(
    func: tirx.PrimFunc, target: Target, template: str, decision: Decision
) -> tirx.PrimFunc:
    """Schedule a function as a candidate says.

    Raises
    ------
    LoweringError
        If the template does not take the function or the decision.
    """
    if not template and not decision:
        return registry.schedule(func, with_variant(target))[0]
    return registry.schedule_with(func, with_variant(target), template, decision)


def build(
    func: tirx.PrimFunc, target: Target, template: str, decision: Decision, artifact: Path
) -> Built | BuildFailure:
    """Schedule, compile and export one candidate as it is compiled inside a model.

    Parameters
    ----------
    func : tirx.PrimFunc
        Unscheduled.
    target : Target
        Complete target.
    template : str
        Name of the template, or empty for the first that accepts the function.
    decision : Decision
        What it chooses.
    artifact : Path
        Library to write.
    """
    try:
        scheduled = schedule_candidate(func, target, template, decision)
    except (LoweringError, s_tir.ScheduleError, *BUILD_ERRORS) as err:
        return BuildFailure("rejected", last_line(err))
    packed: Packed = ()
    if scheduled.attrs is not None and PACKED in scheduled.attrs:
        packed = tuple(
            (int(number), tuple(int(axis) for axis in axes))
            for number, axes in sorted(scheduled.attrs[PACKED].items(), key=lambda pair: pair[0])
        )
        scheduled = scheduled.without_attr(PACKED)
    try:
        if target.kind.name != "cuda":
            return _build_for_cpu(scheduled, target, artifact, packed)
        return _build_for_gpu(scheduled, target, artifact, packed)
    except CompilerError as err:
        verdict = "shared_memory" if _TOO_MUCH_SHARED in str(err) else "compiler"
        return BuildFailure(verdict, last_line(err))
    except BUILD_ERRORS as err:
        return BuildFailure("compiler", last_line(err))


def _build_for_cpu(
    scheduled: tirx.PrimFunc, target: Target, artifact: Path, packed: Packed
) -> Built:
    executable = _compile(scheduled, target)
    export_library(executable, artifact)
    return Built(artifact, _digest(executable, packed), packed=packed)


def _build_for_gpu(
    scheduled: tirx.PrimFunc, target: Target, artifact: Path, packed: Packed
) -> Built | BuildFailure:
    most, dynamic = limits(target).dynamic_shared_bytes, dynamic_shared_bytes(scheduled)
    if dynamic > most:
        return _too_much_shared(dynamic, most)
    arch = str(target.attrs["arch"])
    made: dict[str, tuple[bytes, str]] = {}

    def machine_code(source: str) -> bytes:
        if source not in made:
            made[source] = assemble(source, arch)
        return made[source][0]

    with _compiling_by(machine_code):
        mod = tvm.IRModule({"main": scheduled})
        executable = _compile(scheduled, tir_pipeline.target_of(mod, target))
    if not made:  # where TVM finds no CUDA it does not ask for machine code
        for source in device_sources(executable.mod):
            machine_code(source)
    kernels = [k for _, report in made.values() for k in parse_report(report).values()]
    registers = max((k.registers for k in kernels), default=0)
    spills = sum(k.spill_bytes for k in kernels)
    shared = max((k.shared_bytes for k in kernels), default=0) + dynamic
    taken = {"registers": registers, "spill_bytes": spills, "shared_bytes": shared}
    if spills:
        message = f"a thread spills {spills} bytes beside its {registers} registers"
        return BuildFailure("spills", message, **taken)
    if shared > most:
        return dataclasses.replace(_too_much_shared(shared, most), **taken)
    cubins = {digest(source): code for source, (code, _) in made.items()}
    export_library(executable, artifact, cubins, arch_of("\n".join(made), arch))
    return Built(artifact, _digest(executable, packed, *cubins.values()), packed=packed, **taken)


def _too_much_shared(used: int, most: int) -> BuildFailure:
    message = f"a block takes {used} bytes of shared memory, and may have {most}"
    return BuildFailure("shared_memory", message, shared_bytes=used)


def _compile(scheduled: tirx.PrimFunc, target: Target) -> Any:
    mod = tvm.IRModule({"main": scheduled.with_attr("global_symbol", "main")})
    with tvm.transform.PassContext(opt_level=3, config={"tirx.use_async_copy": True}):
        return tvm.compile(mod, target=target, tir_pipeline=tir_pipeline.NAME)


@contextlib.contextmanager
def _compiling_by(machine_code: Any) -> Iterator[None]:
    """Let TVM get machine code from a function, so that each source is compiled once."""
    with HOOK_LOCK:
        real = tvm.get_global_func(COMPILE_HOOK)
        tvm_ffi.register_global_func(COMPILE_HOOK, machine_code, override=True)
        try:
            yield
        finally:
            tvm_ffi.register_global_func(COMPILE_HOOK, real, override=True)


def _digest(executable: Any, packed: Packed, *device_code: bytes) -> str:
    """SHA-256 of the host's code, which holds the launch parameters, of the device's, and of ``packed``."""
    total = hashlib.sha256(json.dumps(packed).encode())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "host.o")
        executable.mod.write_to_file(str(path))
        total.update(path.read_bytes())
    for code in device_code:
        total.update(code)
    return total.hexdigest()


def make_handler(channel: Channel) -> Handler:
    """What `serve` calls."""
    return BuildHandler()


if __name__ == "__main__":
    serve(make_handler)
