"""The table of networks imported from PyTorch: rows by family, and each network in a process of its own."""

from __future__ import annotations

import json
import subprocess
import types

import pytest

pytest.importorskip("torch")

import torch_import

pytestmark = pytest.mark.torch


def test_rows_are_gathered_by_family():
    rows = [
        {"model": "torchvision/vgg11", "status": "right", "operators": 39, "kernels": 17, "error": 3e-6},
        {"model": "torchvision/vgg13", "status": "right", "operators": 45, "kernels": 19, "error": 4e-6},
        {"model": "torchvision/alexnet", "status": "crashed", "detail": "exit -11"},
    ]  # fmt: skip
    lines = torch_import.table(rows).splitlines()
    assert lines[2] == "| torchvision/alexnet | 0 of 1 | 0 | 0 | nan |"
    assert lines[3] == "| torchvision/vgg | 2 of 2 | 39 to 45 | 17 to 19 | 4.0e-06 |"


@pytest.mark.parametrize(("code", "status"), [(0, "right"), (-11, "crashed")])
def test_a_process_that_dies_is_a_row(monkeypatch, code, status):
    row = json.dumps({"model": "timm/vgg11", "status": "right"})
    answer = types.SimpleNamespace(returncode=code, stdout=f"noise\n{row}\n", stderr="a\nKilled\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: answer)
    row = torch_import.row_of_child("timm/vgg11", "run")
    assert (row["model"], row["status"]) == ("timm/vgg11", status)
    assert code == 0 or row["detail"] == "exit -11: Killed"


def test_a_family_is_run_by_its_smallest_network():
    smallest = torch_import.smallest_of_each_family()
    for first, second in (
        ("torchvision/vgg11", "torchvision/vgg13"),
        ("timm/dla34", "timm/dla46_c"),
    ):
        assert first in smallest
        assert second in torch_import.ZOO and second not in smallest


class Cancelling(torch_import.torch.nn.Module):
    """A large number comes and goes: float32 loses what float64 keeps, unless it is small."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, x):
        return (x + self.size) - self.size


@pytest.mark.parametrize(
    ("size", "off", "status"),
    [(1.0, 0.0, "right"), (1.0, 0.1, "wrong"), (1e6, 0.1, "unsteady")],
)
def test_a_difference_is_ours_only_where_pytorch_itself_is_steady(monkeypatch, size, off, status):
    x = torch_import.torch.linspace(-1, 1, 7)
    model = torch_import.ZooModel("none", "none", "none", lambda: (Cancelling(size).eval(), (x,)))
    wrong = (Cancelling(size)(x) + off).numpy()
    monkeypatch.setattr(torch_import.tf, "compile", lambda *args, **options: lambda *inputs: wrong)
    row = torch_import.measure(model, "run")
    assert row["status"] == status
    assert ("torch_error" in row) == (status != "right")
