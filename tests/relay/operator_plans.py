"""Write a module for each operator that `frontend.relay` imports, and its plans; run where TVM has Relay.

``python operator_plans.py FOLDER`` takes the operators of the fixtures (tests/frontend/relay/relay_models.py) apart.
"""

import sys
from pathlib import Path

import tvm
from tvm import relay

from tvm_fusion.testing.relay_plans import write_plans

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "frontend" / "relay"))
from relay_models import ZOO, Builder

if __name__ == "__main__":
    for fill in ZOO:
        builder = Builder()
        fill(builder)
        for number, result in enumerate(builder.outputs):
            inputs = list(relay.analysis.free_vars(result))
            if not inputs:
                continue  # a constant: nothing to plan
            mod = tvm.IRModule.from_expr(relay.Function(inputs, result))
            call = result.tuple_value if isinstance(result, relay.TupleGetItem) else result
            name = f"{call.op.name}-{fill.__name__}_{number}"
            write_plans(Path(sys.argv[1]), name, relay.transform.InferType()(mod))
