"""The data that all contenders share: inputs, weights, float64 outputs, and exported programs.

A worker like the others, but it writes files instead of being measured.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch_rows import Workload, build, exported, outputs_of

from .base import Context, Peer
from .torch_peer import ceilings


class Reference(Peer):
    """Writes a row's data to its folder."""

    def versions(self) -> dict[str, str]:
        found = {"torch": torch.__version__}
        if self.context.device == "cuda":
            found["device"] = torch.cuda.get_device_name()
        return found

    def prepare(self, row: str, dtype: str) -> dict[str, Any]:
        """Write inputs, weights, the float64 outputs of the rounded weights, and the program."""
        folder = self.context.folder(row, dtype)
        done = folder / "done"
        about: dict[str, Any] = {}
        if done.exists():
            return about
        folder.mkdir(parents=True, exist_ok=True)
        work = build(row, dtype)
        for i, x in enumerate(work.inputs):
            x = x.to(getattr(torch, dtype)) if x.is_floating_point() else x
            np.save(folder / f"input{i}.npy", x.numpy())
        state = {k: v.numpy() for k, v in work.module.state_dict().items()}
        np.savez(folder / "weights.npz", **state)
        try:
            torch.export.save(exported(work), folder / "program.pt2")
        except (
            RuntimeError,
            TypeError,
            ValueError,
            AttributeError,
            torch._dynamo.exc.TorchDynamoException,
        ) as error:
            about["export_error"] = str(error).strip().splitlines()[0]
        self._outputs(build(row, dtype), folder)
        done.touch()
        return about

    def _outputs(self, work: Workload, folder: Any) -> None:
        """Save the outputs in float64."""
        module = work.module.to(device=self.context.device, dtype=torch.float64)
        inputs = [
            x.to(self.context.device, torch.float64 if x.is_floating_point() else x.dtype)
            for x in work.inputs
        ]
        with torch.no_grad():
            for i, out in enumerate(outputs_of(module(*inputs))):
                np.save(folder / f"reference{i:02}.npy", out.cpu().numpy())
        del module, inputs
        if self.context.device == "cuda":
            torch.cuda.empty_cache()

    def ceilings(self) -> dict[str, float]:
        """The device's rates, measured alone."""
        return ceilings() if self.context.device == "cuda" else {}


def create(context: Context) -> Reference:
    """Make the worker's object."""
    return Reference(context)
