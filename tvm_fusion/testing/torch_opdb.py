"""PyTorch's own operator database (``op_db``) run through export, import, plan and llvm.

``torch.testing._internal`` keeps sample inputs of every operator, odd ones among them: tensors of
rank 0 and without elements, negative axes, broadcasts. Run as a module this is a worker of
`LastingWorker`: a request is ``[operator, number of the sample]``, the answer an `Outcome` as a
list. It needs the package expecttest, which ``torch.testing._internal`` imports.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from .lasting_worker import LastingWorker, WorkerDied, last_line, serve

#: Seconds for one sample, and samples of each operator (the first, the last and some between).
LIMIT, SAMPLES = 120.0, 4

#: Samples of these take minutes, and add nothing that ``nn.functional`` has not.
_LEFT_OUT = ("ops.", "_refs.")


@dataclass(frozen=True)
class Outcome:
    """What became of one sample of an operator.

    Attributes
    ----------
    operator : str
        Its name in ``op_db``.
    sample : int
        Number of the sample among those that are run.
    verdict : str
        right, refused, constant (nothing to compute: an input, or a result without elements),
        no_export (PyTorch itself does not export it), unclear (refused without the name of an
        operator), wrong, raised or crashed.
    reason : str
        What was said, or the difference.
    """

    operator: str
    sample: int
    verdict: str
    reason: str = ""


@functools.cache
def operators() -> dict[str, Any]:
    """Return the entries of ``op_db`` that take float32, by name."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return {
        op.formatted_name: op
        for op in op_db
        if torch.float32 in op.dtypes and not op.formatted_name.startswith(_LEFT_OUT)
    }


@functools.lru_cache(maxsize=1)
def samples(name: str) -> list[Any]:
    """Return the samples of an operator that are run; the same ones each time."""
    import torch

    torch.manual_seed(0)
    try:
        found = list(operators()[name].sample_inputs("cpu", torch.float32, requires_grad=False))
    except (RuntimeError, ValueError, TypeError, AttributeError, ImportError):
        return []  # some ask for a GPU or for packages of their own
    chosen = np.unique(np.linspace(0, len(found) - 1, SAMPLES).astype(int)) if found else []
    return [found[i] for i in chosen]


def _as_module(operator: Any, sample: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a module whose inputs are the sample's tensors, and those; the rest is part of it."""
    import torch
    from torch.utils import _pytree

    leaves, spec = _pytree.tree_flatten(([sample.input, *sample.args], dict(sample.kwargs)))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    class Module(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> Any:
            values = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                values[place] = tensor
            args, kwargs = _pytree.tree_unflatten(values, spec)
            return operator.op(*args, **kwargs)

    return Module(), tuple(leaves[i].detach().clone() for i in places)


def run_sample(name: str, number: int) -> Outcome:
    """Export, import, compile and run one sample in this process, and compare it with PyTorch."""
    import torch
    from torch.utils import _pytree

    from .. import api
    from ..errors import FusionError
    from ..frontend.torch import load

    outcome = functools.partial(Outcome, name, number)
    module, tensors = _as_module(operators()[name], samples(name)[number])
    try:
        with torch.no_grad():
            torch.manual_seed(0)
            wanted = _pytree.tree_leaves(module(*[tensor.clone() for tensor in tensors]))
            program = torch.export.export(module, tuple(tensor.clone() for tensor in tensors))
    except Exception as error:  # noqa: BLE001 - PyTorch's matter, whatever it is
        return outcome("no_export", type(error).__name__)
    try:
        compiled = api.compile(load(program), "llvm", verify=False)
    except FusionError as error:
        reason = str(error)
        if "computes nothing" in reason:
            return outcome("constant", reason)
        clear = any(word in reason for word in ("operator", "the program"))
        return outcome("refused" if clear else "unclear", reason)
    except Exception as error:  # noqa: BLE001 - what it is, is the verdict
        return outcome("raised", f"compiling: {type(error).__name__}: {last_line(error)}")
    try:
        results = compiled(*[tensor.contiguous().numpy() for tensor in tensors])
    except Exception as error:  # noqa: BLE001 - as above
        return outcome("raised", f"running: {type(error).__name__}: {last_line(error)}")
    results = list(results) if isinstance(results, list | tuple) else [results]
    problem = _difference([np.asarray(result) for result in results], wanted)
    return outcome("wrong", problem) if problem else outcome("right")


def _difference(results: list[np.ndarray], wanted: list[Any]) -> str:
    """Return how results differ from PyTorch's; empty when they agree. Of Python's numbers only values count."""
    import torch

    wanted = [value for value in wanted if value is not None]
    if len(results) != len(wanted):
        return f"{len(results)} outputs instead of {len(wanted)}"
    for i, (got, value) in enumerate(zip(results, wanted, strict=True)):
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and value.dtype is torch.bfloat16:  # NumPy has none
            got, value = got.astype("float32"), value.float()
        right = value.detach().numpy() if is_tensor else np.asarray(value)
        if got.shape != right.shape or (is_tensor and got.dtype != right.dtype):
            return f"output {i} is {got.dtype}{list(got.shape)} instead of {right.dtype}{list(right.shape)}"
        if right.dtype.kind != "f":
            if not np.array_equal(got, right):
                return f"output {i} has other values"
        else:
            finite = np.abs(right[np.isfinite(right)]).max(initial=1)
            if np.allclose(got, right, rtol=1e-4, atol=1e-5 * finite, equal_nan=True):
                continue
            with np.errstate(all="ignore"):
                largest = np.abs(got.astype("float64") - right)
            finite = largest[np.isfinite(largest)]
            return (
                f"output {i} differs by {finite.max(initial=0):.3g}, {np.isnan(got).sum()} NaN for "
                f"{np.isnan(right).sum()}"
            )
    return ""


def run_samples(requests: Iterable[tuple[str, int]], worker: LastingWorker) -> Iterator[Outcome]:
    """Run samples in a worker, one after the other; one that ends the worker has crashed."""
    for name, number in requests:
        try:
            yield Outcome(*worker.ask([name, number]))
        except WorkerDied as error:
            yield Outcome(name, number, "crashed", str(error))


def main() -> None:
    """Be a worker."""
    operators()
    serve(lambda request: astuple(run_sample(*request)))


if __name__ == "__main__":
    main()
