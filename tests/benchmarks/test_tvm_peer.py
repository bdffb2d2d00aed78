"""Stock TVM as a contender: its candidates run alone on the GPU, and nothing else of its tuning does."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from peers import tvm_peer
from peers.base import Context
from tvm.s_tir import meta_schedule


def test_candidates_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, ran = [], []

    @contextlib.contextmanager
    def alone(context):
        held.append(context)
        yield
        held.pop()

    class Runner:
        def run(self, inputs):
            ran.append((list(inputs), list(held)))
            return []

    monkeypatch.setattr(tvm_peer, "gpu_alone", alone)
    monkeypatch.setattr(meta_schedule.runner, "LocalRunner", Runner)
    context = Context(tmp_path, "cuda", tmp_path)
    runner = tvm_peer.runner_alone(context)
    assert not held  # making it holds nothing
    assert list(runner.run([])) == [] and ran == [([], [context])] and not held
