"""A build worker with templates that go wrong; run by tests in the place of the real one."""

from __future__ import annotations

import os
import signal
import time

from tvm_fusion.schedules import ScheduleTemplate, register, templates

from tvm_fusion.compat import s_tir
from tvm_fusion.targets import parse_target
from tvm_fusion.tuning.build_worker import make_handler
from tvm_fusion.tuning.serve import serve


class Hangs(ScheduleTemplate):
    name, kind = "hangs", "llvm"

    def apply(self, func, target):
        time.sleep(3600)


class Crashes(ScheduleTemplate):
    name, kind = "crashes", "llvm"

    def apply(self, func, target):
        os.kill(os.getpid(), signal.SIGSEGV)


class Refuses(ScheduleTemplate):
    name, kind = "refuses", "llvm"

    def apply(self, func, target):
        return None


class Stumbles(ScheduleTemplate):
    name, kind = "stumbles", "llvm"

    def apply(self, func, target):
        print("libraries print where they should not")
        raise ZeroDivisionError("a mistake of ours")


class Spills(ScheduleTemplate):
    """Rows of 256 values, each in the registers of one of 1024 threads, which have 64 each."""

    name, kind = "spills", "cuda"

    def apply(self, func, target):
        sch = s_tir.Schedule(func)
        (out,) = sch.get_output_blocks(sch.get_sblock("root"))
        rows, columns = sch.get_loops(out)
        block, thread = sch.split(rows, [None, 1024])
        sch.bind(block, "blockIdx.x")
        sch.bind(thread, "threadIdx.x")
        sch.unroll(columns)
        (total,) = sch.get_producers(out)
        sch.set_scope(total, 0, "local")
        sch.compute_at(total, thread)
        sch.unroll(sch.get_loops(total)[-1])
        values = sch.cache_read(total, 0, "local", consumer_blocks=[total, out])
        sch.compute_at(values, thread)
        sch.unroll(sch.get_loops(values)[-1])
        return sch


class Shares(ScheduleTemplate):
    """All rows of the input in the shared memory of one block, static or dynamic."""

    kind = "cuda"

    def __init__(self, name, scope):
        self.name, self._scope = name, scope

    def apply(self, func, target):
        sch = s_tir.Schedule(func)
        (out,) = sch.get_output_blocks(sch.get_sblock("root"))
        (total,) = sch.get_producers(out)
        staged = sch.cache_read(total, 0, self._scope, consumer_blocks=[total, out])
        sch.set_scope(total, 0, "shared")
        whole = sch.get_loops(out)[0]
        one, rows = sch.split(whole, [1, None])
        sch.bind(one, "blockIdx.x")
        for block in (total, staged):
            sch.compute_at(block, one)
            sch.bind(sch.get_loops(block)[1], "threadIdx.x")
        sch.bind(rows, "threadIdx.x")
        return sch


if __name__ == "__main__":
    for kind in ("llvm", "cuda:sm_80"):
        templates(parse_target(kind))  # the real ones come first
    for template in (
        Hangs(), Crashes(), Refuses(), Stumbles(), Spills(),
        Shares("shares", "shared"), Shares("shares_more", "shared.dyn"),
    ):  # fmt: skip
        register(template)
    serve(make_handler)
