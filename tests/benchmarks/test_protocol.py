"""The clock against a stand-in for the CUDA driver that checks every argument."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import protocol
import pytest

#: Every function returns an error when an argument arrives changed (a handle cut to 32 bits, say).
STUB = r"""
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
typedef void *P;
#define STREAM ((P)0x7000000000001)
#define GRAPH ((P)0x7100000000001)
#define CAPTURED ((P)0x7200000000001)
#define WHOLE ((P)0x7300000000001)
#define BUFFER 0x7fff00000000
static int events, launches, children;
int cuInit(unsigned f) { return f != 0; }
int cuDeviceGetCount(int *c) { *c = 1; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return i != 0; }
int cuDeviceGetName(char *b, int n, int d) { snprintf(b, n, "Stub"); return d != 0; }
int cuStreamCreate(P *s, unsigned f) { *s = STREAM; return f != 1; }
int cuEventCreate(P *e, unsigned f) { *e = (P)(0x7000000001000 + ++events); return f != 0; }
int cuMemAlloc_v2(uint64_t *p, size_t z) { *p = BUFFER; return z != (512u << 20); }
int cuMemsetD32Async(uint64_t p, unsigned v, size_t k, P s) {
  return !(p == BUFFER && v == 1 && k == (128u << 20) && s == STREAM);
}
int cuStreamSynchronize(P s) { return s != STREAM; }
int cuGraphLaunch(P g, P s) { launches++; return !(g == GRAPH && s == STREAM); }
int cuEventRecord(P e, P s) { return !((uint64_t)e > 0x7000000001000 && s == STREAM); }
int cuEventElapsedTime_v2(float *f, P a, P b) { *f = 0.02f; return (uint64_t)b != (uint64_t)a + 1; }
int cuStreamBeginCapture_v2(P s, int m) { return !(s == STREAM && m == 2); }
int cuStreamEndCapture(P s, P *g) { *g = CAPTURED; return s != STREAM; }
int cuGraphInstantiateWithFlags(P *x, P g, unsigned long long f) {
  *x = GRAPH;
  return !((g == CAPTURED || (g == WHOLE && children == 20)) && f == 0);
}
int cuGraphDestroy(P g) { return g != CAPTURED && g != WHOLE; }
int cuGraphGetNodes(P g, P *nodes, size_t *n) { *n = 3; return !(g == CAPTURED && nodes == NULL); }
int cuGraphCreate(P *g, unsigned f) { *g = WHOLE; return f != 0; }
int cuGraphAddChildGraphNode(P *node, P g, P *before, size_t n, P child) {
  if (g != WHOLE || child != CAPTURED || n != (children > 0)) return 1;
  if (n && *before != (P)(0x7400000001000 + children)) return 2;
  *node = (P)(0x7400000001000 + ++children);
  return 0;
}
int cuMemsetD8Async(uint64_t p, unsigned char v, size_t k, P s) {
  return !(p == BUFFER && v == 255 && k == 5000000000 && s == STREAM);
}
int cuGraphExecDestroy(P g) { return g != GRAPH || launches < 60; }
"""

SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import protocol, run
clock = protocol.CudaClock()
clock.begin_capture()
graph = clock.end_capture()
launch = lambda: clock.launch(graph)
print(json.dumps([run.device_name(), run.has_gpu(), clock.measure(launch, launch, lambda: None).to_dict()]))
captured = protocol.ctypes.c_void_p(0x7200000000001)
print(clock.nodes(captured), clock.chain(captured, 20).value == graph.value)
clock.fill(0x7fff00000000, 5000000000)
clock.destroy(graph)
try:
    clock.destroy(protocol.ctypes.c_void_p(5))
except RuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs a C compiler")
def test_the_clock_calls_the_driver_rightly(tmp_path: Path) -> None:
    (tmp_path / "stub.c").write_text(STUB)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "stub.c"], check=True)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, Path(protocol.__file__).parent],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    head, graphs, error = done.stdout.splitlines()
    # 0.02 ms a replay: 1 µs for each of 20 copies, 20 µs for a graph of one.
    assert head.startswith('["Stub", true, {"warm": 1.0, "cold": 20.0, "call": ')
    assert graphs == "3 True", "copies in a chain: each waits for the one before"
    assert error == "CUDA error 1 in cuGraphExecDestroy"


def test_slow_workloads_are_repeated_less() -> None:
    assert [protocol.number_in_time(s, 30) for s in (0.0, 0.03, 0.1, 10.0)] == [30, 30, 10, 5]


def test_without_a_gpu_there_is_no_cold_time() -> None:
    calls = []
    times = protocol.cpu_times(lambda: calls.append(1), seconds=0.01)
    assert times.cold is None and times.warm == times.call and len(calls) >= 4
