"""Child process that runs ONNX's native checker, shape inference and simplifier on an untrusted graph.

Run by ``onnx_native.py`` with a ModelProto without its large weights on stdin; never imported by the package. A
malformed graph can crash or hang this native code, which then costs one child process. The answer on stdout is one
line of JSON, followed by the resulting ModelProto.
"""

import json
import os
import sys


def main() -> None:
    """Read a model from stdin, process it, write the answer to stdout."""
    request = json.loads(sys.argv[1])
    _limit_memory(request["memory_bytes"])
    # Native libraries print to the file descriptors: keep a private copy of stdout and close theirs.
    answer = os.fdopen(os.dup(1), "wb")
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)

    import onnx

    model = onnx.load_model_from_string(sys.stdin.buffer.read())
    header: dict[str, str] = {}
    try:
        if request["stage"] == "check":
            model = _check(model)
        else:
            model = _simplify(model, request["fold_limit"])
    except Exception as error:  # noqa: BLE001 - reported to the parent, which decides
        header = {"error": type(error).__name__, "message": str(error)}
        model = onnx.ModelProto()
    answer.write(json.dumps(header).encode() + b"\n")
    answer.write(model.SerializeToString())
    answer.close()
    os._exit(0)  # native libraries' teardown has nothing to add


def _check(model):
    import onnx

    if not all(value.type.tensor_type.HasField("shape") for value in model.graph.output):
        # The checker wants shapes of outputs, which exporters may leave out.
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    onnx.checker.check_model(model)
    if model.functions:
        import onnx.inliner

        model = onnx.inliner.inline_local_functions(model)
    return onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)


def _simplify(model, fold_limit):
    import onnxsim

    # Without "optimization" the nodes keep their names and no batch norm is fused: that is our passes' work.
    simplified, _ = onnxsim.simplify(
        model, perform_optimization=False, tensor_size_threshold=f"{fold_limit // 1024}KB"
    )
    return simplified


def _limit_memory(limit):
    try:
        import resource
    except ImportError:  # not on Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
