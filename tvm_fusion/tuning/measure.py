"""What is built and measured, and what comes back: plain data that crosses process boundaries."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..build.signature import TensorSpec
from ..devices import TF32
from ..schedules.decisions import Decision

#: Permutation by number of the parameter (see ``schedules.base.PACKED``).
Packed = tuple[tuple[int, tuple[int, ...]], ...]


@dataclasses.dataclass(frozen=True)
class KernelSource:
    """An unscheduled kernel and where it will run.

    Attributes
    ----------
    kernel : str
        Digest of the function, 16 hexadecimal digits.
    func_json : str
        ``tvm.ir.save_json`` of a module with the function as ``main``.
    target : str
        The complete target in TVM's JSON form.
    """

    kernel: str
    func_json: str = dataclasses.field(repr=False)
    target: str = dataclasses.field(repr=False)

    @property
    def kind(self) -> str:
        """Kind of the target, ``"cuda"`` or ``"llvm"``."""
        return str(json.loads(self.target)["kind"])

    @property
    def has_tf32(self) -> bool:
        """Whether its float32 products may be in TF32."""
        return TF32 in json.loads(self.target).get("keys", ())


@dataclasses.dataclass(frozen=True)
class BuildRequest:
    """One candidate: a kernel scheduled by a template with a decision.

    An empty template with an empty decision means what would be compiled without tuning.
    """

    source: KernelSource
    template: str = ""
    decision: Decision = ()

    @property
    def trial(self) -> str:
        """Digest of kernel, target, template and decision: names the files of this candidate."""
        what = [self.source.kernel, self.source.target, self.template, list(self.decision)]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Built:
    """A compiled candidate.

    Attributes
    ----------
    artifact : Path
        Shared library with the function ``main``, which plain TVM loads and runs. It lives as long
        as the builder.
    code_digest : str
        SHA-256 of the machine code, with all that decides how it is launched: equal ones need to be
        measured once.
    registers, spill_bytes, shared_bytes : int or None
        What the kernel takes (the largest, where there are several); shared memory is static and
        dynamic. None on a CPU.
    packed : Packed
        Constant parameters that the kernel wants permuted.
    """

    artifact: Path
    code_digest: str
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    packed: Packed = ()


@dataclasses.dataclass(frozen=True)
class BuildFailure:
    """A candidate that is not worth measuring, or cannot be.

    Attributes
    ----------
    verdict : {"rejected", "spills", "shared_memory", "compiler", "timeout", "crashed"}
        ``"rejected"``: the template says no.
    message : str
        Why, in one line.
    registers, spill_bytes, shared_bytes : int or None
        As of `Built`, where they are known.
    """

    verdict: str
    message: str
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arguments of a kernel, made again from a seed wherever they are needed, and what must come out.

    Attributes
    ----------
    seed : int
        Seed of the random values.
    positive : bool
        Whether they are positive: for kernels that take roots or logarithms of them.
    params : tuple of TensorSpec
        All parameters.
    outputs, constants : tuple of int
        Numbers of those that the kernel writes, and of those that are constants in the model.
    references : tuple of str
        A ``.npy`` file for each output, in a type as wide or wider.
    tolerances : tuple of float
        Of each output: largest error relative to the largest reference value; of integers the share
        of elements that may differ (where a float decides them, as in argmax).
    """

    seed: int
    positive: bool
    params: tuple[TensorSpec, ...]
    outputs: tuple[int, ...]
    constants: tuple[int, ...]
    references: tuple[str, ...]
    tolerances: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Inputs:
        """Read what `to_dict` made."""
        params = tuple(TensorSpec(p["name"], tuple(p["shape"]), p["dtype"]) for p in data["params"])
        rest = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in data.items()
            if key != "params"
        }
        return Inputs(params=params, **rest)


@dataclasses.dataclass(frozen=True)
class RunRequest:
    """A compiled candidate to check and to time on given inputs."""

    built: Built
    inputs: Inputs
    kind: str

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON."""
        return {
            "artifact": str(self.built.artifact),
            "packed": self.built.packed,
            "inputs": self.inputs.to_dict(),
            "kind": self.kind,
        }


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What measuring a candidate gave.

    Attributes
    ----------
    verdict : {"ok", "wrong", "crashed", "timeout", "error", "lost"}
        ``"error"``: it cannot be loaded or launched. ``"lost"``: not measured, through no fault of
        its own (no server is left); not to be recorded.
    samples_us : tuple of float
        Microseconds per call of each measurement; empty unless ``"ok"``.
    message : str
        Why not, in one line.
    """

    verdict: str
    samples_us: tuple[float, ...] = ()
    message: str = ""

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> RunResult:
        """Read a worker's answer."""
        samples = tuple(float(s) for s in data.get("samples_us", ()))
        return RunResult(str(data["verdict"]), samples, str(data.get("message", "")))


class Runner(Protocol):
    """Measures candidates somewhere.

    Attributes
    ----------
    in_parts : bool
        Whether a few candidates at a time are as quick, each, as many together.
    """

    in_parts: bool

    def run(self, requests: Sequence[RunRequest]) -> list[RunResult]:
        """Check and time candidates; results in the order of the requests."""

    def close(self) -> None:
        """End the processes."""
