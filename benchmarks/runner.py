"""Prepares rows in all workers side by side, then times them one after another, in rounds."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accuracy import within
from peers import CONTENDERS
from processes import Lane, WorkerError
from results import finished, make_row, median_of, put_row, write_results
from rows import EMPTY, ROWS

Key = tuple[str, str]
EMPTY_KEY: Key = (EMPTY.name, "float32")
#: Seconds of one measurement after which two rounds are enough.
SLOW = 2.0


@dataclasses.dataclass
class Options:
    """What to run.

    Attributes
    ----------
    out : Path
        Results file.
    contenders : list of str
        Names, in the order of ``CONTENDERS``.
    rounds : int
        Measurements of each contender, taken in turn.
    batch : int
        Rows that are prepared together.
    budget : float
        Seconds after which no batch is begun.
    prepare_limit, measure_limit : float
        Seconds for one contender to compile a row, and for one round.
    batch_limit : float
        Seconds after which a batch is measured; what is not compiled by then is missing.
    retry : bool
        Whether rows in which a contender is missing are measured again.
    """

    out: Path
    contenders: list[str]
    rounds: int = 5
    batch: int = 6
    budget: float = float("inf")
    prepare_limit: float = 180.0
    measure_limit: float = 60.0
    batch_limit: float = float("inf")
    retry: bool = False


class NoReferenceError(Exception):
    """Nothing can be compared, so nothing is measured."""


class Runner:
    """One run of the benchmark.

    Parameters
    ----------
    options : Options
        What to run.
    results : dict
        The results file's contents; rows are added.
    make_lane : callable
        Makes the worker of a contender (name, shard).
    """

    def __init__(
        self, options: Options, results: dict[str, Any], make_lane: Callable[[str, int], Lane]
    ) -> None:
        self.options, self.results = options, results
        self.start = time.monotonic()
        self.reference = make_lane("reference", 0)
        most = max(
            1, (os.cpu_count() or 1) // 4
        )  # on a small machine they only wait for each other
        self.lanes = {
            name: [make_lane(name, i) for i in range(min(CONTENDERS[name].shards, most))]
            for name in options.contenders
        }
        self._shard: dict[Key, int] = {}

    def say(self, text: str) -> None:
        """Report progress."""
        print(f"[{time.monotonic() - self.start:6.1f} s] {text}", file=sys.stderr, flush=True)

    def run(self, keys: Sequence[Key]) -> bool:
        """Measure rows that are not finished; return whether all are now."""
        options = self.options
        wanted, retry = options.contenders, options.retry
        todo = [k for k in keys if not finished(self.results, k, wanted, retry)]
        known = set(self.results["empty_kernel_us"]) | set(self.results.get("empty_missing", {}))
        needs_empty = not set(options.contenders) <= known
        self.say(f"{len(todo)} rows to measure, {len(keys) - len(todo)} are finished")
        try:
            if needs_empty and todo:
                self._batch([EMPTY_KEY, *todo[: options.batch]])
                todo = todo[options.batch :]
            while todo:
                spent = time.monotonic() - self.start
                if spent > options.budget:
                    self.say(
                        f"the budget of {options.budget:.0f} s is spent; {len(todo)} rows are left"
                    )
                    return False
                self._batch(todo[: options.batch])
                todo = todo[options.batch :]
        except NoReferenceError as error:
            self.say(str(error))
            return False
        finally:
            for lane in (self.reference, *(x for lanes in self.lanes.values() for x in lanes)):
                lane.close()
        return all(finished(self.results, k, wanted) for k in keys)

    def _batch(self, keys: Sequence[Key]) -> None:
        about, missing, failed = self._prepare(keys)
        if len(failed) == len(keys):
            raise NoReferenceError(next(iter(failed.values())))
        versions = self.results["versions"]
        for name, lanes in {"reference": [self.reference], **self.lanes}.items():
            for lane in lanes:
                versions.update({k: v for k, v in lane.versions.items() if k != "device"})
                if lane.missing:
                    self.say(f"{name}: {lane.missing}")
        if not self.results["ceilings"]:
            try:
                self.results["ceilings"] = self.reference.ask({"do": "ceilings"}, 120.0)
            except WorkerError as error:
                self.say(f"ceilings: {error}")
        for key in keys:
            if key not in failed:
                self._measure(key, about[key], missing[key])
                write_results(self.options.out, self.results)
        for key in keys:
            for name in self.lanes:
                self._lane(name, key).release(key)

    def _lane(self, name: str, key: Key) -> Lane:
        lanes = self.lanes[name]
        return lanes[self._shard[key] % len(lanes)]

    def _prepare(
        self, keys: Sequence[Key]
    ) -> tuple[dict[Key, dict[str, dict[str, Any]]], dict[Key, dict[str, str]], dict[Key, str]]:
        """Let every worker compile its rows.

        Returns
        -------
        about : dict
            What each contender says of each row.
        missing : dict
            Why a contender has none.
        failed : dict
            Why a row has no reference.
        """
        about: dict[Key, dict[str, dict[str, Any]]] = {k: {} for k in keys}
        missing: dict[Key, dict[str, str]] = {k: {} for k in keys}
        written = {k: threading.Event() for k in keys}
        failed: dict[Key, str] = {}
        self._shard = {k: i for i, k in enumerate(keys)}
        deadline = time.monotonic() + self.options.batch_limit
        keys = sorted(keys, key=lambda k: not ROWS[k[0]].network)  # the longest first

        def write_data() -> None:
            for key in keys:
                try:
                    self.reference.prepare(key, self.options.prepare_limit)
                except WorkerError as error:
                    failed[key] = f"no reference: {error}"
                finally:
                    written[key].set()

        def prepare(name: str, lane: Lane) -> None:
            own = [key for key in keys if self._lane(name, key) is lane]
            if own:
                lane.start()  # it loads its framework while the first data are written
            for key in own:
                written[key].wait()
                begun = time.monotonic()
                if key in failed:
                    continue
                limit = min(self.options.prepare_limit, deadline - begun)
                try:
                    if limit <= 0:
                        raise WorkerError("no time was left to compile it")
                    about[key][name] = lane.prepare(key, limit)
                    seconds = time.monotonic() - begun
                    self.say(f"  {name} is ready for {' '.join(key)} after {seconds:.1f} s")
                except WorkerError as error:
                    missing[key][name] = str(error)
                    self.say(f"  {name} is missing for {' '.join(key)}: {str(error)[:120]}")

        lanes = [(name, lane) for name, each in self.lanes.items() for lane in each]
        with concurrent.futures.ThreadPoolExecutor(len(lanes) + 1) as pool:
            jobs = [pool.submit(write_data), *(pool.submit(prepare, *pair) for pair in lanes)]
            for job in jobs:
                job.result()
        return about, missing, failed

    def _measure(
        self, key: Key, about: Mapping[str, Mapping[str, Any]], missing: dict[str, str]
    ) -> None:
        """Time one row: contenders in turn, several rounds."""
        network = ROWS[key[0]].network
        active = []
        for name in self.options.contenders:
            if name in missing:
                continue
            error = about[name]["error"]
            if within(error, key[1], network):
                active.append(name)
            else:
                missing[name] = f"over tolerance: error {error}"
        # A worker that was replaced compiles the row again, from the compilers' caches.
        again = self.options.prepare_limit if network else min(60.0, self.options.prepare_limit)
        limits = self.options.measure_limit, again
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in active}
        slow: set[str] = set()
        for i in range(self.options.rounds):
            turn = i % max(len(active), 1)
            for name in [*active[turn:], *active[:turn]]:
                if name in missing or (name in slow and i > 1):
                    continue
                begun = time.monotonic()
                try:
                    rounds[name].append(self._lane(name, key).measure(key, *limits))
                    if time.monotonic() - begun > SLOW:
                        slow.add(name)
                except WorkerError as error:
                    missing[name] = str(error)
        rounds = {name: r for name, r in rounds.items() if name not in missing}
        if key == EMPTY_KEY:
            self._empty(rounds, missing)
            return
        row = make_row(key, rounds, about, missing, self.results)
        put_row(self.results, row)
        best = min(row["peers"], key=row["peers"].get, default="none")
        self.say(
            f"{' '.join(key)}: ours {row['ours_us']}, unfused {row['unfused_us']}, "
            f"{best} {row['peers'].get(best)}, expert {row['expert_us']}, floor {row['floor_us']} us"
        )

    def _empty(self, rounds: Mapping[str, Any], missing: Mapping[str, str]) -> None:
        for prefix, clock in (("", "warm"), ("cold_", "cold"), ("call_", "call")):
            found = {name: median_of(r, clock) for name, r in rounds.items()}
            self.results[f"{prefix}empty_kernel_us"].update(
                {name: us for name, us in found.items() if us is not None}
            )
        self.results["empty_missing"] = dict(missing)
