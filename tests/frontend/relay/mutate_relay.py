"""Damage saved Relay modules and read them: ``python mutate_relay.py SEED COUNT FILE...``.

Prints one line a mutant before it is read (so that a crash shows which one it was) and its outcome
after. Only errors of this package are outcomes; any other exception ends the process.
"""

from __future__ import annotations

import copy
import gzip
import json
import random
import sys
import warnings
from pathlib import Path
from typing import Any

from tvm_fusion.errors import FusionError
from tvm_fusion.frontend import relay

EXTREMES = (0, -1, 1, 2, 3, 7, 255, 1000, 65536, 2**31 - 1, 2**31, 2**40, 2**62, -(2**63), 2**63)

TEXTS = (
    "", "nan", "inf", "-inf", "1e300", "NCHW", "NHWC", "float16", "int8", "bool", "float32", "int64", "bfloat16",
    "handle", "float32x4", "custom[x]32", "_1", "1_0", "é", "9" * 30,
)  # fmt: skip


def change_field(node: dict[str, Any], count: int, chance: random.Random) -> None:
    """Change, or take away, one field of a node."""
    name = chance.choice(sorted(node["attrs"]))
    old, kind = node["attrs"][name], chance.random()
    if kind < 0.1:
        del node["attrs"][name]
    elif kind < 0.5:
        node["attrs"][name] = str(chance.randrange(count))
    elif kind < 0.75:
        node["attrs"][name] = str(chance.choice(EXTREMES))
    elif kind < 0.9 or not old.lstrip("-").isdecimal():
        node["attrs"][name] = chance.choice(TEXTS)
    else:
        node["attrs"][name] = str(int(old) + chance.choice((-2, -1, 1, 2)))


def change_items(node: dict[str, Any], count: int, chance: random.Random) -> None:
    """Change one item of a list."""
    data, kind = node["data"], chance.random()
    place = chance.randrange(len(data))
    if kind < 0.6:
        data[place] = chance.randrange(count)
    elif kind < 0.75:
        del data[place]
    elif kind < 0.9:
        data.append(chance.choice(data))
    else:
        data[place] = chance.choice((-1, 10**9, None, "x", 1.5, True))


def change_array(arrays: list[Any], chance: random.Random) -> None:
    """Change one constant."""
    place = chance.randrange(len(arrays))
    text = arrays[place] if arrays[place] and isinstance(arrays[place], str) else "AAAA"
    position = chance.randrange(len(text))
    arrays[place] = chance.choice(
        (
            text[:position],
            text[:position] + "Q" + text[position + 1 :],
            "",
            text[:20] + text[24:],
            5,
        )
    )


def mutate(document: Any, chance: random.Random) -> Any:
    """Return a copy with a few changes."""
    document = copy.deepcopy(document)
    nodes = document["nodes"]
    for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
        node, kind = chance.choice(nodes), chance.random()
        if kind < 0.55 and node.get("attrs"):
            change_field(node, len(nodes), chance)
        elif kind < 0.8 and node.get("data"):
            change_items(node, len(nodes), chance)
        elif kind < 0.9:
            node["type_key"] = chance.choice(
                (chance.choice(nodes)["type_key"], "relay.If", "tir.Any", "x", "relay.Constant")
            )
        elif kind < 0.95 and "repr_str" in node:
            texts = [other["repr_str"] for other in nodes if "repr_str" in other]
            node["repr_str"] = chance.choice([*texts, *TEXTS])
        elif kind < 0.97:
            nodes[chance.randrange(len(nodes))] = copy.deepcopy(chance.choice(nodes))
        elif document["b64ndarrays"]:
            change_array(document["b64ndarrays"], chance)
    return document


def flip(text: str, chance: random.Random) -> str:
    """Change, take away or add a few letters of the JSON text."""
    letters = list(text)
    for _ in range(chance.choice((1, 1, 2, 5))):
        place = chance.randrange(len(letters))
        letters[place] = chance.choice(("", "0", "7", '"', "{", "]", ",", "x", letters[place] * 2))
    return "".join(letters)


def main(seed: int, count: int, files: list[str]) -> None:
    """Read mutants and print what became of each."""
    warnings.simplefilter("ignore")
    chance = random.Random(seed)
    texts = [gzip.decompress(Path(name).read_bytes()).decode() for name in files]
    documents = [json.loads(text) for text in texts]
    for number in range(count):
        which = chance.randrange(len(files))
        print(f"mutant {number} of {files[which]}", flush=True)
        if chance.random() < 0.2:
            try:
                document = json.loads(flip(texts[which], chance))
            except ValueError:  # not JSON any more: refused before anything of ours sees it
                print("=> NotJson", flush=True)
                continue
        else:
            document = mutate(documents[which], chance)
        try:
            relay.from_document(document)
        except FusionError as error:
            assert "\n" not in str(error).strip(), error
            print(f"=> {type(error).__name__}", flush=True)
        else:
            print("=> ok", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
