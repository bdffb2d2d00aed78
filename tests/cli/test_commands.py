"""The commands from end to end, on a small ONNX model."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tvm_fusion import api
from tvm_fusion.cli import main
from tvm_fusion.planner import Plan
from tvm_fusion.report import render_plan


def build(batch: int | str = 1) -> onnx.ModelProto:
    """Two convolutions of one input, each with ReLU, added; then a head."""
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array(rng.standard_normal(shape, dtype="float32") * 0.2, name)

    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], "left", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"], "left_relu"),
        helper.make_node("Conv", ["x", "w2", "b2"], ["c2"], "right", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c2"], ["r2"], "right_relu"),
        helper.make_node("Add", ["r1", "r2"], ["sum"], "join"),
        helper.make_node("GlobalAveragePool", ["sum"], ["pool"], "pool"),
        helper.make_node("Flatten", ["pool"], ["flat"], "flatten"),
        helper.make_node("Gemm", ["flat", "w3", "b3"], ["y"], "head", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 10])],
        [
            weight("w1", 8, 3, 3, 3),
            weight("b1", 8),
            weight("w2", 8, 3, 3, 3),
            weight("b2", 8),
            weight("w3", 10, 8),
            weight("b3", 10),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """File of the small model."""
    file = tmp_path_factory.mktemp("model") / "small.onnx"
    onnx.save(build(), file)
    return str(file)


@pytest.fixture(scope="module")
def library(model, tmp_path_factory) -> str:
    """The small model, compiled by the command."""
    file = tmp_path_factory.mktemp("library") / "small.so"
    assert main(["compile", model, "-o", str(file)]) == 0
    return str(file)


def reference(model: str, x: np.ndarray) -> np.ndarray:
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def fails(arguments: list[str], capsys) -> str:
    """Run a command that must fail with exit code 2 and one line on stderr; return that line."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    return lines[0]


def test_plan_as_text(model, capsys) -> None:
    assert main(["plan", model]) == 0
    captured = capsys.readouterr()
    assert "small (float32, " in captured.out and "for llvm" in captured.out
    assert "conv2d" in captured.out
    assert captured.err == ""


def test_plan_as_json_prints_nothing_else(model, capsys) -> None:
    """The output of the process, warnings of libraries included, parses."""
    done = subprocess.run(
        [sys.executable, "-m", "tvm_fusion.cli", "plan", model, "--format", "json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["schema"] == 1
    assert data["model"] == "small"
    assert data["target"]["kind"] == "llvm"
    assert data["totals"]["launches_after"] < data["totals"]["launches_before"]


def test_plan_to_a_file(model, tmp_path, capsys) -> None:
    assert main(["plan", model, "-o", str(tmp_path / "plan.json")]) == 0
    assert main(["plan", model, "-o", str(tmp_path / "plan.txt")]) == 0
    assert capsys.readouterr().out == ""
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    assert (tmp_path / "plan.txt").read_text().strip() == render_plan(plan, width=160)


def test_plan_for_a_gpu_needs_none(model, capsys) -> None:
    arguments = ["plan", model, "--target", "cuda:sm_90a", "--dtype", "float16"]
    assert main([*arguments, "--format", "json"]) == 0
    plan = Plan.from_json(capsys.readouterr().out)
    assert plan.target.arch == "sm_90a"
    assert plan.dtype == "float16"


@pytest.mark.parametrize(("given", "found"), [([], "float32"), (["tf32"], "tf32")])
def test_plan_says_what_float32_products_are_computed_in(model, capsys, given, found) -> None:
    option = ["--float32-products"] if given else []
    arguments = ["plan", model, "--target", "cuda:sm_90", *option, *given]
    assert main([*arguments, "--format", "json"]) == 0
    assert Plan.from_json(capsys.readouterr().out).float32_products == found
    assert main(arguments) == 0
    assert ("float32 products in TF32" in capsys.readouterr().out) == (found == "tf32")


def test_float32_products_of_a_page_a_plan_and_another_type(model, tmp_path, capsys) -> None:
    tf32 = ["--target", "cuda:sm_90", "--float32-products", "tf32"]
    page, plan = tmp_path / "plan.html", tmp_path / "plan.json"
    assert main(["plan", model, *tf32, "-o", str(page)]) == 0
    assert "float32 products in TF32" in page.read_text()
    assert main(["plan", model, *tf32, "-o", str(plan)]) == 0
    assert main(["verify", model, "--target", "llvm", "--plan", str(plan)]) == 0
    capsys.readouterr()
    line = fails(["verify", model, "--plan", str(plan), "--float32-products", "tf32"], capsys)
    assert "leave out --float32-products" in line
    assert main(["plan", model, "--float32-products", "tf31"]) == 2


@pytest.mark.nvcc
def test_plan_with_build_reads_the_compiler(model, capsys) -> None:
    """Without a GPU: what each kernel takes comes from nvcc."""
    assert main(["plan", model, "--target", "cuda:sm_80", "--build", "--format", "json"]) == 0
    plan = Plan.from_json(capsys.readouterr().out)
    assert plan.groups
    for group in plan.groups:
        assert group.registers > 0
        assert group.spill_bytes is not None
        assert group.shared_bytes is not None
        assert group.template


def test_plan_options_reach_the_planner(model, capsys) -> None:
    def groups(*options: str) -> tuple:
        assert main(["plan", model, "--format", "json", *options]) == 0
        return Plan.from_json(capsys.readouterr().out).groups

    assert groups()
    assert {group.strategy for group in groups("--strategies", "vertical")} == {"vertical"}
    assert all(group.depth <= 2 for group in groups("--max-depth", "2"))
    assert not groups("--deny", "*")
    assert not any("conv2d" in group.operators for group in groups("--deny", "conv2d"))


def test_shape_fixes_a_symbolic_dimension(tmp_path, capsys) -> None:
    file = tmp_path / "symbolic.onnx"
    onnx.save(build("N"), file)
    fixed = ["plan", str(file), "--shape", "x=2,3,16,16", "--format", "json"]
    assert main(fixed) == 0
    assert Plan.from_json(capsys.readouterr().out).groups
    assert main(["plan", str(file), "--format", "json"]) == 0
    loose = Plan.from_json(capsys.readouterr().out)
    assert not loose.groups
    assert "dynamic_shape" in {item.reason for item in loose.ungrouped}


@pytest.mark.parametrize("words", [["plan"], ["explain"], ["compile", "-o", "open.so"]])
def test_an_open_dimension_is_told_once(words, tmp_path, monkeypatch, capsys) -> None:
    """Such a model compiles, and nothing of it is fused: the reader has to hear why."""
    monkeypatch.chdir(tmp_path)
    onnx.save(build("batch"), "open.onnx")
    assert main([words[0], "open.onnx", *words[1:]]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "input 'x' leaves batch open" in line and line.endswith("--shape x=N,3,16,16")
    assert main([words[0], "open.onnx", *words[1:], "--shape", "x=1,3,16,16"]) == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize("command", ["verify", "bench", "tune"])
def test_what_runs_a_model_wants_its_shapes(command, tmp_path, capsys) -> None:
    file = tmp_path / "symbolic.onnx"
    onnx.save(build("N"), file)
    more = ["--work-dir", str(tmp_path / "work")] if command == "tune" else []
    assert main([command, str(file), *more]) == 2
    assert "input 'x' has a symbolic shape; fix it with --shape" in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


def test_compile_says_what_was_saved(model, tmp_path, capsys) -> None:
    assert main(["compile", model, "-o", str(tmp_path / "a.so")]) == 0
    assert "kernel launches unfused" in capsys.readouterr().out
    assert (tmp_path / "a.so").is_file()


@pytest.mark.parametrize("option", [[], ["--no-records"]])
def test_compile_leaves_out_what_comes_with_the_package(
    option, model, tmp_path, monkeypatch
) -> None:
    asked = []
    real = api.tuned_records

    def records(*args, **options):
        asked.append(options["shipped"])
        return real(*args, **options)

    monkeypatch.setattr(api, "tuned_records", records)
    assert main(["compile", model, "-o", str(tmp_path / "a.so"), *option]) == 0
    assert asked == [not option]


def test_compile_follows_a_plan(model, tmp_path, capsys) -> None:
    plan = tmp_path / "plan.json"
    assert main(["plan", model, "--strategies", "vertical", "-o", str(plan)]) == 0
    expected = Plan.from_json(plan.read_text()).totals.launches_after
    assert main(["compile", model, "--plan", str(plan), "-o", str(tmp_path / "a.so")]) == 0
    assert f"{expected} fused" in capsys.readouterr().out


def test_run_gives_the_right_result(model, library, tmp_path, capsys) -> None:
    x = np.random.default_rng(1).standard_normal((1, 3, 16, 16)).astype("float32")
    np.save(tmp_path / "x.npy", x)
    out = tmp_path / "out"
    arguments = ["run", library, "--input", f"x={tmp_path / 'x.npy'}", "--output", str(out)]
    assert main(arguments) == 0
    assert "float32[1, 10] min" in capsys.readouterr().out
    (file,) = out.glob("*.npy")
    np.testing.assert_allclose(np.load(file), reference(model, x), rtol=1e-4, atol=1e-5)


def test_run_with_random_inputs_follows_the_seed(library, capsys) -> None:
    shown = []
    for seed in ("1", "1", "2"):
        assert main(["run", library, "--seed", seed]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2]


def test_the_library_runs_with_plain_tvm(model, library, tmp_path) -> None:
    """Without tvm_fusion, which a fresh process must not even be able to import."""
    x = np.random.default_rng(2).standard_normal((1, 3, 16, 16)).astype("float32")
    np.save(tmp_path / "x.npy", x)
    (tmp_path / "plain.py").write_text(
        "import sys\n"
        "sys.modules['tvm_fusion'] = None\n"
        "import numpy as np, tvm\n"
        "from tvm import relax\n"
        f"vm = relax.VirtualMachine(tvm.runtime.load_module({library!r}), tvm.cpu())\n"
        "out = vm['main'](tvm.runtime.tensor(np.load('x.npy'), tvm.cpu()))\n"
        "out = out if hasattr(out, 'numpy') else out[0]\n"
        "np.save('y.npy', out.numpy())\n"
    )
    done = subprocess.run(
        [sys.executable, "plain.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(
        np.load(tmp_path / "y.npy"), reference(model, x), rtol=1e-4, atol=1e-5
    )


def test_verify(model, capsys) -> None:
    assert main(["verify", model]) == 0
    assert capsys.readouterr().out.strip()


def test_bench(model, capsys) -> None:
    assert main(["bench", model]) == 0
    assert "unfused" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["plan", "verify", "bench"])
def test_a_missing_model(command, tmp_path, capsys) -> None:
    assert "nowhere.onnx" in fails([command, str(tmp_path / "nowhere.onnx")], capsys)


def test_a_truncated_model(model, tmp_path, capsys) -> None:
    data = open(model, "rb").read()
    (tmp_path / "half.onnx").write_bytes(data[: len(data) // 2])
    assert "half.onnx" in fails(["plan", str(tmp_path / "half.onnx")], capsys)


def test_an_operator_that_tvm_lacks(tmp_path, capsys) -> None:
    node = helper.make_node("NoSuchOperator", ["x"], ["y"], "odd", domain="example")
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("example", 1)]
    graph = helper.make_graph([node], "odd", value[:1], value[1:])
    file = tmp_path / "odd.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), file)
    assert "NoSuchOperator" in fails(["plan", str(file)], capsys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "vulkan"], "unknown target 'vulkan'"),
        (["--target", "cuda:sm_12345"], "unknown CUDA arch 'sm_12345'"),
        (["--strategies", "diagonal"], "--strategies: unknown strategy 'diagonal'"),
        (["--max-members", "0"], "--max-members must be a positive integer, got 0"),
        (["--max-operators", "-1"], "--max-operators must be a positive integer"),
        (["--max-work-ratio", "0.5"], "--max-work-ratio must be a number of at least 1"),
        (["--max-recompute", "nan"], "--max-recompute must be a number of at least 1"),
        (["--max-shared-memory", "0"], "--max-shared-memory must be a positive integer"),
        (["--max-registers", "0"], "--max-registers must be a positive integer"),
        (["--min-occupancy", "2"], "--min-occupancy must be at most 1"),
        (["--max-build-seconds", "-1"], "--max-build-seconds must be a number of at least 0"),
        (["--shape", "x"], "not of the form"),
        (["--shape", "x=1,2,3"], "x"),
        (["--shape", "z=1,3,16,16"], "z"),
    ],
)
def test_bad_options(options, message, model, capsys) -> None:
    assert message in fails(["plan", model, *options], capsys)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": 99}', '{"schema": 1}'])
def test_bad_plans(content, model, tmp_path, capsys) -> None:
    (tmp_path / "plan.json").write_text(content)
    arguments = ["compile", model, "-o", str(tmp_path / "a.so")]
    assert "plan" in fails([*arguments, "--plan", str(tmp_path / "plan.json")], capsys)
    assert not (tmp_path / "a.so").exists()


def test_a_plan_leaves_nothing_to_choose(model, tmp_path, capsys) -> None:
    arguments = ["verify", model, "--plan", str(tmp_path / "p.json"), "--deny", "relu"]
    assert "leave out --deny" in fails(arguments, capsys)
    message = fails([*arguments, "--max-work-ratio", "2"], capsys)
    assert "leave out --deny and --max-work-ratio" in message


def test_a_plan_that_is_not_text(model, tmp_path, capsys) -> None:
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00\x80")
    message = fails(["verify", model, "--plan", str(tmp_path / "plan.json")], capsys)
    assert "--plan" in message and "plan.json is not text" in message


def test_a_deny_pattern_that_matches_nothing_warns(model, capsys) -> None:
    assert main(["plan", model, "--deny", "conv3d", "--deny", "relu"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "warning: --deny 'conv3d' matches no operator; did you mean 'conv2d'" in line


def test_a_deny_pattern_that_matches_is_silent(model, capsys) -> None:
    assert main(["plan", model, "--deny", "left*", "--deny", "conv2d"]) == 0
    assert capsys.readouterr().err == ""


def test_plan_as_html(model, tmp_path, capsys) -> None:
    assert main(["plan", model, "--format", "html"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("<!DOCTYPE html>") and "<title>small: fusion plan</title>" in shown
    assert main(["plan", model, "-o", str(tmp_path / "plan.html")]) == 0
    assert capsys.readouterr().out == ""
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == shown


def test_explain_a_node(model, capsys) -> None:
    assert main(["explain", model, "--node", "left_relu"]) == 0
    captured = capsys.readouterr()
    assert "left_relu: relu" in captured.out and "In fused_" in captured.out
    assert captured.err == ""


def test_explain_as_json(model, capsys) -> None:
    assert main(["explain", model, "--node", "left", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["node"] == "left"
    assert [o["facts"]["op"] for o in data["operators"]] == ["conv2d", "add"]


def test_explain_the_model(model, capsys) -> None:
    assert main(["explain", model]) == 0
    assert "groups weighed" in capsys.readouterr().out


def test_explain_an_unknown_node(model, capsys) -> None:
    message = fails(["explain", model, "--node", "left_rel"], capsys)
    assert "no node 'left_rel'; did you mean 'left_relu'" in message


def test_compile_into_a_folder_that_is_not_there(model, tmp_path, capsys) -> None:
    target = str(tmp_path / "none" / "a.so")
    assert "No such folder" in fails(["compile", model, "-o", target], capsys)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((1, 3, 16, 16)), "'x' is float32[1, 3, 16, 16]"),
        (np.zeros((1, 3, 8, 8), "float32"), "holds float32[1, 3, 8, 8]"),
    ],
)
def test_run_checks_its_inputs(array, message, library, tmp_path, capsys) -> None:
    np.save(tmp_path / "x.npy", array)
    assert message in fails(["run", library, "--input", f"x={tmp_path / 'x.npy'}"], capsys)


def test_run_of_something_else(tmp_path, capsys) -> None:
    (tmp_path / "no.so").write_bytes(b"not a library")
    assert "no.so" in fails(["run", str(tmp_path / "no.so")], capsys)
    assert "none.so" in fails(["run", str(tmp_path / "none.so")], capsys)


def test_a_failed_verification_is_exit_code_1(model, monkeypatch, capsys) -> None:
    import tvm_fusion

    class Failed:
        passed = False

        def __str__(self) -> str:
            return "fused_vertical_0 differs"

    monkeypatch.setattr(tvm_fusion, "verify", lambda *_, **__: Failed())
    assert main(["verify", model]) == 1
    assert "fused_vertical_0 differs" in capsys.readouterr().out
