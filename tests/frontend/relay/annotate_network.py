"""Annotate a network with all four passes and save it; run in the environment with Relay.

``python annotate_network.py FOLDER NAME [--stored]`` writes ``NAME.json`` and ``NAME.npz``
with inputs and Relay's results (of the module without annotations). With ``--stored`` it writes
``NAME_annotated_16.json.gz``, in which the weights are described only (tvm_fusion.testing.relay_fixtures):
that is how the files in ``data/networks`` were made.
"""

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import tvm

import tvm_fusion.relay as fusion
from tvm_fusion.testing.relay_fixtures import made_input, with_weights, without_weights
from tvm_fusion.testing.relay_models import bert, network, run_graph, simplified

PASSES = (
    fusion.VerticalFusion,
    fusion.HorizontalFusion,
    fusion.CrossFusion,
    fusion.CompoundFusion,
)

#: Small images where the network takes them; DenseNet's last pool and Inception's have fixed windows.
EXTENTS = {"densenet": 224, "inception-v3": 299}


def main(folder, name, stored):
    """Write the files of one network."""
    before = simplified(bert() if name == "bert" else network(name, EXTENTS.get(name, 64)))
    passes = [make(target="cuda:sm_90a") for make in PASSES]
    text = tvm.ir.save_json(tvm.transform.Sequential(passes)(before))
    if stored:
        small = without_weights(json.loads(text))
        packed = gzip.compress(json.dumps(small, separators=(",", ":")).encode(), mtime=0)
        (folder / f"{name}_annotated_16.json.gz").write_bytes(packed)
        text = json.dumps(with_weights(small))
        before = fusion.StripFusion()(tvm.ir.load_json(text))
    else:
        (folder / f"{name}.json").write_text(text)
    seeds = {p.name_hint: (1, *map(int, p.type_annotation.shape)) for p in before["main"].params}
    results = run_graph(before, [made_input(*seed) for seed in seeds.values()])
    arrays = {f"seed_{key}": np.array(seed) for key, seed in seeds.items()}
    arrays.update({f"out_{i}": value for i, value in enumerate(results)})
    np.savez_compressed(folder / f"{name}.npz", **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], "--stored" in sys.argv[3:])
