"""Every row against every contender, in one run (README.md beside this has the protocol).

python benchmarks/run.py --out results.json                    # ten rows and two BERT blocks, both dtypes
python benchmarks/run.py --out results.json                    # again: goes on where it stopped
python benchmarks/run.py --rows cbr1,fcln4 --dtypes float16 --out results.json
python benchmarks/run.py --networks --rows resnet50_b1 --out networks.json
python benchmarks/run.py --smoke --out smoke.json              # under three minutes; works without a GPU
python benchmarks/run.py --build                               # compile our libraries, no GPU needed
python benchmarks/run.py --out results.json --check            # exit code 1 if a target is missed
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers import CONTENDERS
from processes import Lane, WorkerError
from protocol import COPIES, FLUSH_BYTES, REPLAYS
from results import commit_of, new_results, read_results
from rows import BLOCKS, DTYPES, NETWORKS, chosen_rows
from runner import Options, Runner

SMOKE_ROWS, SMOKE_DTYPES = ("cbr1", "fcln4"), {"cuda": ("float16",), "cpu": ("float32",)}
SMOKE_CONTENDERS = ("eager", "inductor_freeze", "expert", "unfused", "ours")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--out", type=Path, default=Path("results.json"), help="results file, also read to go on"
    )
    p.add_argument("--rows", help=f"comma-separated; default: {','.join(BLOCKS)}")
    p.add_argument("--networks", action="store_true", help=f"also {', '.join(NETWORKS)}")
    p.add_argument("--dtypes", default=",".join(DTYPES))
    p.add_argument("--contenders", help=f"comma-separated, of {', '.join(CONTENDERS)}")
    p.add_argument("--without", default="", help="contenders to leave out, comma-separated")
    p.add_argument("--rounds", type=int, default=5, help="measurements of each contender, in turn")
    p.add_argument("--batch", type=int, default=12, help="rows prepared together")
    p.add_argument(
        "--budget", type=float, default=float("inf"), help="begin no batch after these seconds"
    )
    p.add_argument("--prepare-limit", type=float, default=180.0, help="seconds to compile one row")
    p.add_argument(
        "--batch-limit", type=float, default=float("inf"), help="seconds to compile a batch"
    )
    p.add_argument(
        "--measure-limit", type=float, default=60.0, help="seconds for one round of one contender"
    )
    p.add_argument(
        "--stock-tvm-trials",
        type=int,
        default=0,
        help="add tvm_tuned: meta-schedule trials per row",
    )
    p.add_argument(
        "--tuned",
        type=Path,
        help="work dir of tune_rows.py or tvm-fusion tune: add ours_tuned and ours_tuned_deepest",
    )
    p.add_argument(
        "--retry", action="store_true", help="measure rows again in which a contender is missing"
    )
    p.add_argument("--commit", help="the measured commit, where there is no git")
    p.add_argument(
        "--work",
        type=Path,
        help="folder of data, logs and compilers' caches; default: a temporary one",
    )
    p.add_argument(
        "--cache", type=Path, help="folder of our compiled libraries; default: inside --work"
    )
    p.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda where there is a GPU")
    p.add_argument("--smoke", action="store_true", help="two rows, few contenders, two rounds")
    p.add_argument("--build", action="store_true", help="only compile our libraries, for --target")
    p.add_argument("--target", default="cuda:sm_90", help="for --build: the GPU that they are for")
    p.add_argument("--check", action="store_true", help="exit with 1 if a must target is missed")
    p.add_argument("--quiet", action="store_true", help="do not print the table")
    return p


def has_gpu() -> bool:
    """Whether the CUDA driver finds a device."""
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return (
        driver.cuInit(0) == 0
        and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
        and count.value > 0
    )


def device_name() -> str:
    """The GPU's name, by the driver."""
    import ctypes

    from cuda_driver import Driver

    driver, name, device = Driver(), ctypes.create_string_buffer(128), ctypes.c_int()
    driver("cuInit", 0)
    driver("cuDeviceGet", ctypes.byref(device), 0)
    driver("cuDeviceGetName", name, 128, device)
    return name.value.decode()


def chosen_contenders(args: argparse.Namespace, device: str) -> list[str]:
    """Contenders in the order of the table.

    Raises
    ------
    ValueError
        If a name is unknown.
    """
    if args.contenders:
        wanted = set(args.contenders.split(","))
    elif args.smoke:
        wanted = {n for n in SMOKE_CONTENDERS if device == "cuda" or CONTENDERS[n].cpu}
    else:
        wanted = {n for n, c in CONTENDERS.items() if c.default and (c.cpu or device == "cuda")}
    if args.stock_tvm_trials:
        wanted.add("tvm_tuned")
    if args.tuned:
        wanted |= {"ours_tuned", "ours_tuned_deepest"}
    dropped = set(filter(None, args.without.split(",")))
    unknown = (wanted | dropped) - set(CONTENDERS)
    if unknown:
        raise ValueError(f"unknown contenders {', '.join(sorted(unknown))}")
    return [n for n in CONTENDERS if n in wanted - dropped]


def chosen_keys(args: argparse.Namespace, device: str) -> list[tuple[str, str]]:
    """Rows and dtypes to measure: float16 first.

    Raises
    ------
    ValueError
        If a name is unknown.
    """
    names = args.rows.split(",") if args.rows else None
    dtypes: Sequence[str] = args.dtypes.split(",")
    if args.smoke:
        names, dtypes = names or list(SMOKE_ROWS), SMOKE_DTYPES[device]
    wrong = set(dtypes) - set(DTYPES)
    if wrong:
        raise ValueError(
            f"unknown dtypes {', '.join(sorted(wrong))}; choose from {', '.join(DTYPES)}"
        )
    return [(n, d) for d in DTYPES if d in dtypes for n in chosen_rows(names, args.networks)]


def environment(work: Path) -> dict[str, str]:
    """Environment of the workers: compilers' caches that reruns find again, a few threads each."""
    threads = str(max(1, min(4, (os.cpu_count() or 2) // 3)))
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
        "TRITON_CACHE_DIR": str(work / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": threads,
        "OMP_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def build_libraries(
    keys: Sequence[tuple[str, str]], settings: dict[str, Any], options: Options
) -> int:
    """Compile our fused and unfused libraries into the cache, for a GPU that need not be here."""
    failed, surroundings = 0, environment(Path(settings["work"]))
    lanes = [
        Lane("reference", 0, {**settings, "device": "cpu"}, surroundings),
        *(Lane(name, 0, settings, surroundings) for name in ("ours", "unfused")),
    ]
    for key in keys:
        for lane in lanes:
            verb = "prepare" if lane.contender == "reference" else "build"
            try:
                lane.ask({"do": verb, "row": key[0], "dtype": key[1]}, options.prepare_limit * 5)
                print(f"{lane.contender}: {' '.join(key)}", file=sys.stderr, flush=True)
            except WorkerError as error:
                failed += 1
                print(f"{lane.contender}: {' '.join(key)}: {error}", file=sys.stderr, flush=True)
    for lane in lanes:
        lane.close()
    return int(failed > 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and return the exit status: 1 if a target is missed, 3 if rows are left for want of time."""
    command = parser()
    args = command.parse_args(arguments)
    device = args.device or ("cuda" if has_gpu() else "cpu")
    try:
        keys, contenders = chosen_keys(args, device), chosen_contenders(args, device)
    except ValueError as error:
        command.error(str(error))
    if importlib.util.find_spec("torch") is None:
        command.error("the rows are PyTorch modules: install torch")
    # A trial takes up to some seconds, most of them for the compiler.
    args.prepare_limit = max(args.prepare_limit, 8.0 * args.stock_tvm_trials)
    rounds = min(args.rounds, 2) if args.smoke else args.rounds
    options = Options(
        args.out,
        contenders,
        rounds,
        max(1, args.batch),
        args.budget,
        args.prepare_limit,
        args.measure_limit,
        args.batch_limit,
        args.retry,
    )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        work = (args.work or Path(scratch)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        settings = {
            "work": str(work), "device": device, "cache": str((args.cache or work / "cache").resolve()),
            "options": {
                "stock_tvm_trials": args.stock_tvm_trials,
                "tuned": str(args.tuned.resolve()) if args.tuned else None,
            },
        }  # fmt: skip
        if args.build:
            settings |= {"device": "cuda", "options": {"target": args.target}}
            return build_libraries(keys, settings, options)
        name, commit = (device_name() if device == "cuda" else "CPU"), commit_of(args.commit)
        protocol = {
            "copies": COPIES,
            "replays": REPLAYS,
            "rounds": rounds,
            "flush_bytes": FLUSH_BYTES,
        }
        try:
            results = read_results(args.out, name, commit) or new_results(name, commit, protocol)
        except ValueError as error:
            command.error(str(error))
        runner = Runner(options, results, lambda c, i: Lane(c, i, settings, environment(work)))
        complete = runner.run(keys)
    if not args.quiet:
        from table import markdown

        print(markdown(results))
    if args.check:
        from check import report

        if report(results):
            return 1
    return 0 if complete else 3


if __name__ == "__main__":
    sys.exit(main())
