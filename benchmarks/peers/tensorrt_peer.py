"""TensorRT, where it is installed: built from ONNX in the row's own precision, captured by PyTorch."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import tensorrt as trt
import torch
from torch_rows import TORCH_DTYPE, Workload, build, outputs_of, place

from .base import Peer, Ready, gpu_alone
from .torch_peer import TorchPeer, TorchReady


class Engine:
    """A TensorRT engine as a function of tensors."""

    def __init__(self, plan: Any, logger: Any, examples: list[torch.Tensor]) -> None:
        self._engine = trt.Runtime(logger).deserialize_cuda_engine(plan)
        self._context = self._engine.create_execution_context()
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        mode = trt.TensorIOMode.INPUT
        self._inputs = [n for n in names if self._engine.get_tensor_mode(n) == mode]
        self._outputs = [n for n in names if self._engine.get_tensor_mode(n) != mode]
        self._buffers = [
            torch.empty_like(e, memory_format=torch.contiguous_format) for e in examples
        ]

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for name, tensor in zip(self._inputs, inputs, strict=True):
            self._context.set_tensor_address(name, tensor.data_ptr())
        for name, tensor in zip(self._outputs, self._buffers, strict=True):
            self._context.set_tensor_address(name, tensor.data_ptr())
        if not self._context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise RuntimeError("TensorRT could not run the engine")
        return tuple(self._buffers)


class TensorRT(TorchPeer):
    """TensorRT's own search, without TF32."""

    def versions(self) -> dict[str, str]:
        return {**super().versions(), "tensorrt": trt.__version__}

    def make(self, row: str, dtype: str) -> tuple[Ready, dict[str, Any]]:
        work = build(row, dtype)
        with gpu_alone(self.context):
            function, inputs = self._engine(work)
            function(*inputs)
            return TorchReady(function, inputs, self.clock, self.stream), {}

    def _engine(self, work: Workload) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
        module, inputs = place(work, "cuda")
        inputs = tuple(x.contiguous() for x in inputs)
        module = module.to(TORCH_DTYPE[work.dtype])
        with torch.no_grad():
            examples = outputs_of(module(*inputs))
        model = io.BytesIO()
        torch.onnx.export(module, inputs, model, dynamo=False, opset_version=17)
        logger = trt.Logger(trt.Logger.ERROR)
        builder = trt.Builder(logger)
        flag = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        network = builder.create_network(flag)
        parser = trt.OnnxParser(network, logger)
        if not parser.parse(model.getvalue()):
            raise RuntimeError(f"TensorRT cannot parse the row: {parser.get_error(0)}")
        config = builder.create_builder_config()
        config.clear_flag(trt.BuilderFlag.TF32)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise RuntimeError("TensorRT cannot build the row")
        return Engine(plan, logger, examples), inputs


__all__ = ["Engine", "Peer", "TensorRT"]
