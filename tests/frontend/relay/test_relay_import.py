"""Relay modules saved by TVM 0.8, 0.9 and 0.16, read without Relay: numbers, groups, bad files.

``data/`` holds what ``relay_models.py`` made under each version: the JSON, and one file of inputs and
Relay's own results for all three (they differ by less than 1e-6).
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import re
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest

from tvm_fusion.cli.app import run as cli
from tvm_fusion.errors import InvalidModelError, UnsupportedOperatorError
from tvm_fusion.frontend import load, relay
from tvm_fusion.frontend.relay.flatten import flatten
from tvm_fusion.frontend.relay.graph import Input, TensorType
from tvm_fusion.frontend.relay.nodes import NodeTable

DATA = Path(__file__).parent / "data"
VERSIONS = ("08", "09", "16")
MODELS = (
    "elementwise", "convolutions", "pools", "norms", "products", "reductions", "shapes", "indexing", "images",
    "control", "annotated", "lstm",
)  # fmt: skip


def document(name, version="16"):
    """A saved module as parsed JSON; a new one each time."""
    return json.loads(gzip.decompress((DATA / f"{name}_{version}.json.gz").read_bytes()))


def written(folder, content, name="model.json"):
    """A file with a document."""
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def node_of(content, kind, **fields):
    """The first node of a class that has these fields."""
    for node in content["nodes"]:
        if node["type_key"] == kind and fields.items() <= node.get("attrs", {}).items():
            return node
    raise LookupError(kind)


def run_all(run_module, mod, name):
    """Compare a module with Relay's results, within 1e-4 of the largest number."""
    with np.load(DATA / f"{name}.npz") as arrays:
        inputs = {key.removeprefix("in_"): arrays[key] for key in arrays.files}
        # relay.testing's LSTM has an input "data" for each step; they become data, data_1, ...
        names = [param.name for param in mod["main"].params]
        results = run_module(mod, *[inputs.get(n, inputs.get(n.rpartition("_")[0])) for n in names])
        expected = [arrays[f"out_{i}"] for i in range(len(results))]
        assert f"out_{len(results)}" not in arrays.files
    for got, want in zip(results, expected, strict=True):
        assert got.dtype == want.dtype
        scale = max(float(np.abs(want.astype("float64")).max()), 1e-6)
        np.testing.assert_allclose(got / scale, want / scale, rtol=0, atol=1e-4)


# -- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", MODELS)
def test_matches_relay(run_module, name, version):
    run_all(run_module, relay.from_document(document(name, version)), name)


def test_every_converter_is_exercised():
    """A converter that no fixture reaches would be untested."""
    from tvm_fusion.frontend.relay.operators import CONVERTERS

    found = {
        node["repr_str"]
        for name in MODELS
        for node in document(name)["nodes"]
        if node["type_key"] == "Op"
    }
    # Approximations that only FastMath writes; they share the converters of what they approximate.
    seldom = {"fast_erf", "fast_exp", "fast_tanh", "nn.fast_softmax"}
    assert set(CONVERTERS) - found == seldom


def test_types_are_not_needed(run_module):
    """Without InferType the types are absent: sizes come from the attributes' codes."""
    content = document("shapes")
    for node in content["nodes"]:
        if node["type_key"] in ("relay.Call", "relay.Tuple", "relay.TupleGetItem"):
            node["attrs"]["_checked_type_"] = "0"
    run_all(run_module, relay.from_document(content), "shapes")


def test_single_function():
    """save_json of a function instead of a module."""
    content = document("control")
    content["root"] = content["nodes"].index(node_of(content, "relay.Function"))
    assert [p.name for p in relay.from_document(content)["main"].params] == ["x0"]


def test_names(operators):
    names = dict(operators(relay.from_document(document("lstm"))))
    assert "dense_0" in names
    assert names["dense_0"] == "matmul"


def test_names_of_importers(operators):
    """A span without a position is the name of the node that an importer converted."""
    content = document("control")
    nodes = content["nodes"]
    nodes += [
        {"type_key": "SourceName", "repr_str": "layer1/relu"},
        {"type_key": "Span", "attrs": {"source_name": str(len(nodes)), "line": "0", "column": "0",
                                       "end_line": "0", "end_column": "0"}},
    ]  # fmt: skip
    relu = next(i for i, n in enumerate(nodes) if n.get("repr_str") == "nn.relu")
    node_of(content, "relay.Call", op=str(relu))["attrs"]["span"] = str(len(nodes) - 1)
    assert ("layer1/relu", "nn.relu") in operators(relay.from_document(content))


# -- parameters --------------------------------------------------------------------------------


def array_bytes(array):
    """An array as TVM writes it."""
    code = {"i": 0, "u": 1, "f": 2}[array.dtype.kind]
    head = struct.pack(
        "<QQiiiBBH", 0xDD5E40F096B4A13F, 0, 1, 0, array.ndim, code, 8 * array.itemsize, 1
    )
    return head + struct.pack(f"<{array.ndim + 1}q", *array.shape, array.nbytes) + array.tobytes()


def params_bytes(**arrays):
    """A file of parameters as TVM writes it."""
    names = b"".join(struct.pack("<Q", len(name)) + name.encode() for name in arrays)
    count = struct.pack("<Q", len(arrays))
    return (
        struct.pack("<QQ", 0xF7E58D4F05049CB7, 0) + count + names + count
        + b"".join(map(array_bytes, arrays.values()))
    )  # fmt: skip


def test_params(tmp_path, run_module):
    content = document("products")
    x = np.load(DATA / "products.npz")["in_x0"]
    model, file = written(tmp_path, content), tmp_path / "model.params"
    file.write_bytes(params_bytes(x0=x))
    for given in (file, str(file), file.read_bytes(), {"x0": x}):
        mod = relay.load(model, params=given)
        assert "x0" not in [p.name for p in mod["main"].params]
        run_all(run_module, mod, "products")
    assert "x0" not in [p.name for p in load(model, params=file)["main"].params]


def test_tvm_reads_and_writes_the_same_params(tmp_path):
    import tvm

    x = np.arange(6, dtype="float32").reshape(2, 3)
    data = tvm.runtime.save_param_dict({"x0": tvm.runtime.tensor(x)})
    np.testing.assert_array_equal(relay.load_params(written_bytes(tmp_path, bytes(data)))["x0"], x)
    assert params_bytes(x0=x) == bytes(data)


def written_bytes(folder, data):
    path = folder / "x.params"
    path.write_bytes(data)
    return path


def test_wrong_params(tmp_path):
    content = document("products")
    good = params_bytes(x0=np.zeros((3, 6), "float32"))
    with pytest.raises(InvalidModelError, match=r"missing\.params' does not exist"):
        relay.from_document(content, params=tmp_path / "missing.params")
    for size in range(0, len(good), 7):
        with pytest.raises(InvalidModelError, match=r"truncated|does not begin"):
            relay.from_document(content, params=good[:size])
    with pytest.raises(InvalidModelError, match=r"float32\[3, 5\].*but float32\[3, 6\]"):
        relay.from_document(content, params={"x0": np.zeros((3, 5), "float32")})
    with pytest.raises(TypeError, match="params is a mapping, a file or its bytes, not int"):
        relay.from_document(content, params=5)
    with pytest.raises(TypeError, match="dtype object"):
        relay.from_document(content, params={"x0": np.array([None])})
    with pytest.warns(UserWarning, match="no parameter named other"):
        relay.from_document(content, params={"other": np.zeros(3, "float32")})
    with pytest.raises(ValueError, match=r"goes with a \.json module"):
        (tmp_path / "m.onnx").write_bytes(b"x")
        load(tmp_path / "m.onnx", params=tmp_path / "x.params")


def test_forgotten_params():
    """Weights that stay inputs are worth a warning; one input that is a weight on purpose is not."""
    content = document("norms")
    graph = flatten(NodeTable(content), {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        relay._warn_of_open_weights(graph)
    node = next(n for n in graph.nodes if n.op == "nn.batch_norm")
    names = [Input(f"gamma{i}", TensorType((4,), "float32")) for i in range(2)]
    open_node = dataclasses.replace(node, args=(node.args[0], *names, *node.args[3:]))
    with pytest.warns(UserWarning, match=r"2 weights \(gamma0, gamma1, \.\.\.\) are inputs"):
        relay._warn_of_open_weights(dataclasses.replace(graph, nodes=(open_node,)))
    one = dataclasses.replace(node, args=(*node.args[:2], names[1], *node.args[3:]))
    alone = dataclasses.replace(graph, nodes=(one,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        relay._warn_of_open_weights(alone)
        relay._warn_of_open_weights(graph, given=True)
    with pytest.warns(UserWarning, match="weight gamma1 is an input of the model: give its value"):
        relay._warn_of_open_weights(alone, given=True)


def test_two_gigabyte_constant():
    content = document("annotated")
    data = bytearray(base64.b64decode(content["b64ndarrays"][0]))
    struct.pack_into("<q", data, 32, 1 << 29)
    content["b64ndarrays"][0] = base64.b64encode(bytes(data)).decode()
    with pytest.raises(InvalidModelError, match="constant 0 claims the shape"):
        relay.from_document(content)
    array = np.zeros(4, "float32")
    head = bytearray(array_bytes(array)[:48])
    struct.pack_into("<qq", head, 32, 1 << 30, 4 << 30)
    content["b64ndarrays"][0] = base64.b64encode(bytes(head)).decode()
    with pytest.raises(InvalidModelError, match=r"takes 4294967296 bytes \(limit"):
        relay.from_document(content)


# -- groups ------------------------------------------------------------------------------------


def groups_of(mod):
    """Attributes and operators of each group."""
    return {
        gvar.name_hint: (
            {k: v for k, v in func.attrs.items() if k.startswith("tvm_fusion.")},
            [b.value.op.name for b in func.body.blocks[0].bindings if hasattr(b.value, "op")],
        )
        for gvar, func in mod.functions.items()
        if gvar.name_hint != "main"
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_groups_are_kept(version):
    groups = groups_of(relay.from_document(document("annotated", version)))
    assert set(groups) == {"fused_vertical_0", "fused_horizontal_1", "fused_cross_2"}
    attrs, operators = groups["fused_vertical_0"]
    assert operators == ["relax.nn.conv2d", "relax.add", "relax.nn.relu"]
    assert attrs["tvm_fusion.depth"] == 3
    attrs, operators = groups["fused_horizontal_1"]
    assert operators == ["relax.nn.conv2d"] * 3
    assert attrs["tvm_fusion.members"] == 3
    assert dict(attrs["tvm_fusion.options"]) == {"form": "merged"}


def test_groups_are_planned():
    import tvm_fusion as tf

    plan = tf.plan(relay.from_document(document("annotated")), "cuda:sm_90a")
    assert [(g.strategy, len(g.operators)) for g in plan.groups] == [
        ("vertical", 3), ("horizontal", 3), ("cross", 4)
    ]  # fmt: skip


@pytest.mark.nvcc
def test_groups_become_one_kernel_each():
    import tvm_fusion as tf

    mod = relay.from_document(document("annotated"))
    model = tf.compile(mod, "cuda:sm_90a")
    assert len(model.plan.groups) == 3
    assert model.plan.totals.launches_after == 4  # three groups and a concatenation


def test_groups_in_half_precision():
    """Transposes that the change to channels-last makes at a group's ends are not part of it."""
    groups = groups_of(relay.from_document(document("annotated"), dtype="float16"))
    assert len(groups) == 3
    for _, operators in groups.values():
        assert "relax.permute_dims" not in operators


def test_unknown_strategy_is_planned_like_the_rest():
    content = document("annotated")
    for node in content["nodes"]:
        if node.get("repr_str") == "cross":
            node["repr_str"] = "diagonal"
    with pytest.warns(UserWarning, match="strategy 'diagonal'"):
        mod = relay.from_document(content)
    assert "fused_cross_2" not in groups_of(mod)


def test_group_of_one_operator_is_left_out():
    content = document("annotated")
    for node in content["nodes"]:  # dropouts leave nothing of the chain but its convolution
        if node.get("repr_str") == "nn.relu":
            node["repr_str"] = "copy"
    mod = relay.from_document(content)
    assert len(groups_of(mod)) == 3  # the chain still has its addition


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "tvm_fusion.depth",
            {"type_key": "runtime.String", "repr_str": "deep"},
            "must be of type int",
        ),
        (
            "tvm_fusion.parts",
            {"type_key": "runtime.String", "repr_str": "x"},
            "must be of type list",
        ),
    ],
)
def test_wrong_attributes(key, value, message):
    content = document("annotated")
    group = next(n for n in content["nodes"] if "tvm_fusion.depth" in n.get("keys", ()))
    content["nodes"].append(value)
    group["data"][group["keys"].index(key)] = len(content["nodes"]) - 1
    with pytest.raises(InvalidModelError, match=message):
        relay.from_document(content)


# -- bad files ---------------------------------------------------------------------------------


def test_truncated(tmp_path):
    text = json.dumps(document("control"))
    for tenth in range(10):
        with pytest.raises(InvalidModelError, match="JSON"):
            load(written(tmp_path, text[: len(text) * tenth // 10]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"nodes": [], "arg_nodes": [0], "heads": []}', "graph that relay.build made.*before it is built"),
        ("[]", "no module saved by"),
        ('"model"', "no module saved by"),
        ("v0.0.4\ndef @main(%x: Tensor[(1), float32]) {}", "not a readable JSON file"),
    ],
)  # fmt: skip
def test_files_of_another_kind(tmp_path, text, message):
    with pytest.raises(InvalidModelError, match=message) as error:
        load(written(tmp_path, text))
    assert "\n" not in str(error.value)


def spoiled(change):
    """A document after a change."""
    content = document("control")
    change(content)
    return content


def cyclic(content):
    call = content["nodes"].index(node_of(content, "relay.Call"))
    args = int(content["nodes"][call]["attrs"]["args"])
    content["nodes"][args]["data"][0] = call


def recursive(content):
    """main calls itself."""
    gvar = content["nodes"].index(node_of(content, "GlobalVar"))
    call = node_of(content, "relay.Call", op=next(
        str(i) for i, n in enumerate(content["nodes"]) if n.get("repr_str") == "nn.relu"
    ))  # fmt: skip
    call["attrs"]["op"] = str(gvar)


def symbolic(content):
    function = node_of(content, "relay.Function")
    params = content["nodes"][int(function["attrs"]["params"])]
    var = content["nodes"][params["data"][0]]
    kind = content["nodes"][int(var["attrs"]["type_annotation"])]
    shape = content["nodes"][int(kind["attrs"]["shape"])]
    content["nodes"][shape["data"][0]] = {
        "type_key": "tir.Any",
        "attrs": {"dtype": "int32", "span": "0"},
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(root=99999), "refers to node 99999"),
        (lambda c: c.update(root="1"), "no root node"),
        (
            lambda c: c.update(root=c["nodes"].index(node_of(c, "relay.Call"))),
            r"\(relay.Call\), not a module or a function: save the module",
        ),
        (lambda c: c.update(nodes=c["nodes"][:40]), "damaged or truncated"),
        (lambda c: c["nodes"].__setitem__(2, 7), "node 2 has no type_key"),
        (lambda c: node_of(c, "relay.Call").update(type_key="relay.Phone"), "node .*relay.Phone"),
        (lambda c: node_of(c, "relay.Call")["attrs"].update(colour="1"), "unknown field 'colour'"),
        (lambda c: node_of(c, "relay.Call")["attrs"].update(op="one"), "'one' in its field 'op'"),
        (lambda c: node_of(c, "relay.Call")["attrs"].pop("args"), "gives 0 arguments to a function of 1"),
        (lambda c: node_of(c, "relay.TupleGetItem")["attrs"].update(index="7"), "item 7"),
        (lambda c: c.update(b64ndarrays=[]), "has 0 constants"),
        (lambda c: c.update(b64ndarrays=["!!"] * 9), "no base64|is not an array|ends too early"),
        (cyclic, "cyclic"),
        (symbolic, r"dimension 0 of input 'x0' is symbolic \(\?,.*--shape x0="),
    ],
)  # fmt: skip
def test_damaged(change, message):
    with pytest.raises(InvalidModelError, match=message):
        relay.from_document(spoiled(change))


def test_recursion():
    with pytest.raises(UnsupportedOperatorError, match="recursion"):
        relay.from_document(spoiled(recursive))


@pytest.mark.parametrize("kind", ["relay.If", "relay.Match", "relay.RefCreate"])
def test_control_flow(kind):
    def change(content):
        node_of(content, "relay.Tuple").update(type_key=kind, attrs={})

    with pytest.raises(
        UnsupportedOperatorError, match=rf"{kind.removeprefix('relay.')} \(node \d+"
    ):
        relay.from_document(spoiled(change))


def test_unknown_operators_are_named_with_their_place():
    content = document("elementwise")
    for node in content["nodes"]:
        if node.get("repr_str") in ("tanh", "sqrt"):
            node["repr_str"] += "_q"
    with pytest.raises(
        UnsupportedOperatorError,
        match=r"operator tanh_q \(node 'tanh_q_0', JSON node \d+\); operator sqrt_q",
    ):
        relay.from_document(content)


def test_attributes_out_of_range():
    content = document("convolutions")
    strides = node_of(content, "relay.attrs.Conv2DAttrs")["attrs"]["strides"]
    content["nodes"].append(
        {"type_key": "IntImm", "attrs": {"dtype": "int32", "span": "0", "value": "0"}}
    )
    content["nodes"][int(strides)]["data"] = [len(content["nodes"]) - 1] * 2
    with pytest.raises(InvalidModelError, match="strides is 0, not an integer from 1"):
        relay.from_document(content)


def test_wrong_stored_type():
    """What type inference stored is compared with what the operator computes."""
    content = document("pools")
    nodes = content["nodes"]
    call = node_of(content, "relay.Call")
    nodes.append(json.loads(json.dumps(nodes[int(call["attrs"]["_checked_type_"])])))
    nodes[-1]["attrs"]["dtype"] = "float64"
    call["attrs"]["_checked_type_"] = str(len(nodes) - 1)
    with pytest.raises(
        InvalidModelError, match=r"its stored type is float64\[.*but it computes float32\["
    ):
        relay.from_document(content)


def test_fixed_sizes(run_module):
    """A symbolic input gets its sizes from ``shape``; wrong ones are refused."""
    content = spoiled(symbolic)
    run_all(run_module, relay.from_document(content, shape={"x0": (2, 3)}), "control")
    with pytest.raises(ValueError, match="contradicts"):
        relay.from_document(content, shape={"x0": (2, 4)})
    with pytest.raises(ValueError, match="no input 'y'"):
        relay.from_document(content, shape={"y": (2, 4)})


def test_other_versions_are_tried():
    content = document("control")
    content["attrs"]["tvm_version"] = "0.14.0"
    with pytest.warns(UserWarning, match=r"saved by TVM 0\.14\.0"):
        relay.from_document(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        content["attrs"]["tvm_version"] = "0.16.dev0"
        relay.from_document(content)


def test_functions_that_double_at_each_level():
    """2**60 calls: refused, not tried."""
    content = document("control")
    with pytest.raises((InvalidModelError, UnsupportedOperatorError), match=r"more than|deep"):
        relay.from_document(doubling(content, 60))


def doubling(content, levels):
    """Replace main's body by f0(x), each f calling the next one twice."""
    nodes = content["nodes"]

    def add(kind, **attrs):
        nodes.append({"type_key": kind, "attrs": {k: str(v) for k, v in attrs.items()}})
        return len(nodes) - 1

    def array(*items):
        nodes.append({"type_key": "Array", "data": list(items)})
        return len(nodes) - 1

    def variable():
        return add("relay.Var", vid=add("relay.Id", name_hint=0), type_annotation=0)

    var = variable()
    function = add("relay.Function", params=array(var), body=var, ret_type=0, attrs=0)
    for _ in range(levels):
        var = variable()
        once = add("relay.Call", op=function, args=array(var), attrs=0, span=0)
        twice = add("relay.Call", op=function, args=array(once), attrs=0, span=0)
        function = add("relay.Function", params=array(var), body=twice, ret_type=0, attrs=0)
    main = node_of(content, "relay.Function")
    param = nodes[int(main["attrs"]["params"])]["data"][0]
    main["attrs"]["body"] = str(add("relay.Call", op=function, args=array(param), attrs=0, span=0))
    return content


def test_deep_chain():
    """3000 calls inside each other: no recursion of Python's is involved."""
    content = document("control")
    nodes = content["nodes"]
    main = node_of(content, "relay.Function")
    tanh = next(str(i) for i, n in enumerate(nodes) if n.get("repr_str") == "tanh")
    value = nodes[int(main["attrs"]["params"])]["data"][0]
    for _ in range(3000):
        nodes.append({"type_key": "Array", "data": [value]})
        args = str(len(nodes) - 1)
        attrs = {"op": tanh, "args": args, "attrs": "0", "span": "0", "_checked_type_": "0"}
        nodes.append({"type_key": "relay.Call", "attrs": attrs})
        value = len(nodes) - 1
    main["attrs"]["body"] = str(value)
    table = NodeTable(content)
    assert len(flatten(table, {}).nodes) == 3000


def test_node_table_reads_both_kinds_of_text():
    """TVM 0.8 writes a slice mode as it is, later ones as the index of a String."""
    for version in VERSIONS:
        content = document("indexing", version)
        table = NodeTable(content)
        index = content["nodes"].index(node_of(content, "relay.attrs.StridedSliceAttrs"))
        assert table.get(index, "slice_mode") == "end"


def test_every_operator_is_documented():
    from tvm_fusion.frontend.relay.operators import CONVERTERS

    page = (Path(__file__).parents[3] / "docs" / "relay-models.md").read_text(encoding="utf-8")
    section = page.split("## Operators\n")[1].split("\n## ")[0]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`([^`]+)`", row)} == set(CONVERTERS)


# -- command line ------------------------------------------------------------------------------


def test_command_line(tmp_path, capsys):
    model, file = written(tmp_path, document("products")), tmp_path / "w.params"
    file.write_bytes(params_bytes(x0=np.load(DATA / "products.npz")["in_x0"]))
    assert cli(["plan", str(model), "--params", str(file), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == 1
    assert cli(["plan", str(model), "--params", str(tmp_path / "none")]) == 2
    assert "none' does not exist" in capsys.readouterr().err
    library = tmp_path / "annotated.so"
    annotated = written(tmp_path, document("annotated"), "annotated.json")
    assert cli(["compile", str(annotated), "-o", str(library)]) == 0
    assert library.is_file()
    assert cli(["verify", str(annotated)]) == 0
    assert "3 of 3 groups match" in capsys.readouterr().out
