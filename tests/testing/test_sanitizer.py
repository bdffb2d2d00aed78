"""What is read from compute-sanitizer's output."""

from __future__ import annotations

import pytest

from tvm_fusion.testing.sanitizer import count, explain, reports

ACCESS = """\
========= Invalid __global__ read of size 4 bytes
=========     at fused_vertical_1_kernel+0x7b0
=========     by thread (64,0,0) in block (2,0,0)
=========     Address 0x7f2a04002800 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f2a04000000 of size 10240 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: [0x33199f] in libcuda.so.1
=========
"""
CONTEXT = """\
========= Program hit CUDA_ERROR_INVALID_CONTEXT (error 201) due to "invalid device context" on CUDA API call to \
cuEventCreate.
=========     Saved host backtrace up to driver entry point at error
=========         Host Frame: [0x7e2e] in libffi.so.8
=========
"""
QUERY = CONTEXT.replace("cuEventCreate", "cuGetProcAddress_v2").replace(
    'CUDA_ERROR_INVALID_CONTEXT (error 201) due to "invalid device context"',
    'CUDA_ERROR_NOT_FOUND (error 500) due to "named symbol not found"',
)
RACE = """\
========= Error: Race reported between Write access at k+0x90 and Read access at k+0xa0 [64 hazards]
=========
"""


def output(*parts, errors, tool="ERROR"):
    return f"========= COMPUTE-SANITIZER\nhello\n{''.join(parts)}========= {tool} SUMMARY: {errors} errors\n"


def test_reports_are_told_apart():
    access, call = reports(output(ACCESS, CONTEXT, errors=2))
    assert (access.call, call.call) == ("", "cuEventCreate")
    assert access.lines[1] == "at fused_vertical_1_kernel+0x7b0" and len(access.lines) == 7
    assert count(output(ACCESS, CONTEXT, errors=2)) == 2


@pytest.mark.parametrize(
    ("parts", "errors"), [([], 0), ([QUERY], 1), ([QUERY, QUERY], 2)], ids=["none", "one", "two"]
)
def test_nothing_is_wrong(parts, errors):
    assert explain(output(*parts, errors=errors)) == ""


@pytest.mark.parametrize(
    ("parts", "errors", "said"),
    [
        ([ACCESS], 1, "1 errors: 1 reports of kernels or the program, 0 of failed CUDA calls"),
        ([CONTEXT], 1, "on CUDA API call to cuEventCreate"),
        ([QUERY, CONTEXT], 2, "1 errors: 0 reports of kernels or the program, 1 of failed"),
        ([QUERY], 2, "1 errors: 0 reports"),  # one that is counted and not shown
        ([], 3, "3 errors"),
    ],
    ids=["access", "call", "query and call", "not shown", "count alone"],
)
def test_what_is_wrong_is_said(parts, errors, said):
    assert said in explain(output(*parts, errors=errors))


def test_kernels_come_first():
    text = explain(output(*[CONTEXT] * 9, ACCESS, errors=10))
    assert text.index("fused_vertical_1_kernel") < text.index("cuEventCreate")
    assert text.count("cuEventCreate") == 4


def test_races():
    assert "Race reported" in explain(output(RACE, errors=1, tool="RACECHECK"))
    assert explain(output(errors=0, tool="RACECHECK")) == ""


def test_an_output_that_ends_early():
    assert "no summary" in explain("========= COMPUTE-SANITIZER\n")
