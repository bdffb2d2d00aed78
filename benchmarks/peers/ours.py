"""This project: the fused plan, and the same module with one kernel per operator.

Libraries are kept by the digest of the package's sources, so a later run, or another machine, does
not compile them again. Importing runs in a process of its own, because PyTorch and TVM need not
fit into one; what is timed is the library in plain TVM.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from processes import Worker, WorkerError

import tvm_fusion as tf
from tvm_fusion.build.program import NotStaticError
from tvm_fusion.config import STRATEGIES

from .base import Context, Peer, Ready, file_lock, gpu_alone
from .tvm_run import TvmReady, shared_clock, versions, vm_ready

_IMPORT_SECONDS = 300
_IMPORT = Path(__file__).with_name("import_program.py")


@functools.cache
def sources_digest() -> str:
    """Digest of all Python sources of the package, the same for a checkout and an installation."""
    from tvm_fusion import schedules

    package, templates = Path(tf.__file__).parent, Path(schedules.__file__).parent
    files = {f"schedules/{f.relative_to(templates)}": f for f in templates.rglob("*.py")}
    # An installation has the templates inside the package.
    own = {str(f.relative_to(package)): f for f in package.rglob("*.py")}
    files |= {name: f for name, f in own.items() if not name.startswith(("schedules/", "_version"))}
    total = hashlib.sha256()
    for name, file in sorted(files.items()):
        total.update(name.encode() + b"\0" + file.read_bytes())
    return total.hexdigest()[:12]


def imported(context: Context, row: str, dtype: str) -> tvm.IRModule:
    """The row's canonical Relax module, imported once by a child process.

    Raises
    ------
    RuntimeError
        If the program cannot be exported or imported.
    """
    folder = context.folder(row, dtype)
    path = folder / f"module-{sources_digest()}.json"
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock(folder / "import.lock"):
        if not path.exists():
            _import_program(folder / "program.pt2", dtype, path, context.work / "logs")
    return tvm.ir.load_json(path.read_text())


def _import_program(program: Path, dtype: str, path: Path, logs: Path) -> None:
    if not program.exists():
        raise RuntimeError("torch.export failed on this row")
    partial = path.with_suffix(".partial")
    request = {"program": str(program), "dtype": dtype, "output": str(partial)}
    try:
        _importer(logs).ask(request, _IMPORT_SECONDS)
    except WorkerError as error:
        if error.dead:
            _importer.cache_clear()
        raise RuntimeError(f"the import failed: {error}") from None
    partial.replace(path)


@functools.cache
def _importer(logs: Path) -> Worker:
    """This process's importer; it ends when this process closes its standard input."""
    return Worker([sys.executable, str(_IMPORT)], logs / f"import-{os.getpid()}.log")


def target_of(context: Context) -> str:
    """This machine's GPU, another one named for building, or the CPU."""
    if context.device == "cpu":
        return "llvm"
    return str(context.options.get("target") or "cuda")


class Ours(Peer):
    """``tvm_fusion.compile``, fused (by all strategies, or some) or not.

    Parameters
    ----------
    context : Context
        Where it runs; its option ``tuned`` is a work dir of ``tvm-fusion tune``.
    fused : bool
        Whether to fuse. The unfused side takes tuned kernels, too, where there are any.
    strategies, deny : sequence of str
        Some instead of all; operators that stay alone.
    tuned : {"", "depth", "deepest"}
        Whether to take tuned kernels, and then whether the depth follows the measured times, or is what
        would be planned without them.
    """

    def __init__(
        self,
        context: Context,
        fused: bool,
        strategies: Sequence[str] = (),
        tuned: str = "",
        deny: Sequence[str] = (),
    ) -> None:
        super().__init__(context)
        self.fused, self.tuned = fused, tuned
        self.config = tf.FusionConfig(strategies=tuple(strategies) or STRATEGIES, deny=tuple(deny))
        self.work_dir = context.options.get("tuned") if tuned or not fused else None
        if tuned and not self.work_dir:
            raise LookupError("not asked for: give --tuned")
        parts = [
            "fused" if fused else "unfused",
            *strategies,
            *(f"no_{name}" for name in deny),
            tuned or bool(self.work_dir) * "tuned",
        ]
        self.side = "-".join(filter(None, parts))

    def versions(self) -> dict[str, str]:
        return {**versions(), "tvm_fusion": tf.__version__, "sources": sources_digest()}

    def library(self, row: str, dtype: str) -> tuple[Path, dict[str, Any]]:
        """Compile a row, unless its library is in the cache; return its path and what is known of it."""
        from tvm_fusion.targets import parse_target

        target = parse_target(target_of(self.context))
        arch = str(target.attrs.get("arch", "")) if target.kind.name == "cuda" else "llvm"
        name = f"{row}-{dtype}-{self.side}-{arch}-{sources_digest()}"
        path, notes = self.context.cache / f"{name}.so", self.context.cache / f"{name}.json"
        if not (path.exists() and notes.exists()):
            self.context.cache.mkdir(parents=True, exist_ok=True)
            about = self._compile(imported(self.context, row, dtype), target, path)
            notes.write_text(json.dumps(about))
        return path, json.loads(notes.read_text())

    def _compile(self, module: tvm.IRModule, target: Any, path: Path) -> dict[str, Any]:
        from tvm_fusion.build.model import unfused_plan

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if self.fused:
                # The benchmark compares with float64 itself.
                config = self.config
                plan = tf.plan(module, target, config) if self.tuned == "deepest" else None
                config = None if plan is not None else config
            else:
                plan, config = unfused_plan(tf.plan(module, target)), None
            # Untuned is untuned: without the records that come with the package, too.
            model = tf.compile(
                module, target, plan=plan, config=config, verify=False, work_dir=self.work_dir,
                records=bool(self.work_dir),
            )  # fmt: skip
        model.export(path)
        totals = dataclasses.asdict(model.plan.totals)
        after = "after" if self.fused else "before"
        return {
            "launches": totals[f"launches_{after}"],
            "plan_bytes": totals[f"bytes_{after}"],
            "plan_flops": totals[f"flops_{after}"],
            "predicted_us": totals[f"predicted_us_{after}"],
            "kernels": model.cuda_kernels(),
            # Contenders of the same code differ by what processes differ in, and by nothing else.
            "code": hashlib.sha256("\n".join(model.cuda_sources()).encode()).hexdigest()[:16],
            "groups": [
                {"strategy": g.strategy, "form": dict(g.options).get("form"), "template": g.template,
                 "operators": list(g.operators)}
                for g in model.plan.groups
            ],
            "left_unfused": [
                str(w.message)[:300] for w in caught if issubclass(w.category, RuntimeWarning)
            ],
        }  # fmt: skip

    def make(self, row: str, dtype: str) -> tuple[Ready, dict[str, Any]]:
        path, about = self.library(row, dtype)
        inputs, last = arranged(self.context, row, dtype)
        if self.context.device == "cuda":
            try:
                with gpu_alone(self.context):
                    return loaded(path, inputs, last), about
            except NotStaticError as error:
                about = {**about, "not_static": str(error)}
        library = tvm.runtime.load_module(str(path.resolve()))
        return vm_ready(library, inputs, last, self.context.device), about


def loaded(path: Path, arrays: list[np.ndarray], channels_last: bool) -> TvmReady:
    """A library by ``tvm_fusion.load``: its kernels for the graphs, and its own replays beside them.

    Raises
    ------
    NotStaticError
        If the model's calls cannot be recorded.
    """
    model, device = tf.load(path), tvm.cuda(0)
    inputs = [tvm.runtime.tensor(x, device) for x in arrays]
    outputs = [tvm.runtime.empty(s.shape, s.dtype, device) for s in model.signature.outputs]
    stream = shared_clock().stream.value

    def launch(*values: Any) -> list[Any]:
        return model.launch(values, outputs, stream=stream)

    return TvmReady(launch, inputs, channels_last, model)


def arranged(context: Context, row: str, dtype: str) -> tuple[list[np.ndarray], bool]:
    """A row's inputs as this project's module takes them, and whether images are channels last."""
    from rows import ROWS

    last = ROWS[row].image and dtype != "float32"
    inputs = context.inputs(row, dtype)
    if last:
        inputs = [np.ascontiguousarray(x.transpose(0, 2, 3, 1)) for x in inputs]
    return inputs, last
