"""Forms whose kernels do not round as the model does, where it asks for that."""

from __future__ import annotations

from ..config import FusionConfig
from ..devices import DeviceSpec
from ..graph.dataflow import DataflowGraph
from ..strategies.base import Proposal
from .base import ACCEPTED, Guard, Verdict

_NARROW = ("float16", "bfloat16")

#: What each form leaves out.
_FORMS = {
    "collapsed": "the weights are added before the products, so that no branch is rounded on its own",
    "attention": "scores and weights stay in registers, and the weights are scaled after the second product",
}


class Roundings(Guard):
    """Refuses, with ``numerics="strict"``, forms that leave out roundings to float16 or bfloat16."""

    reason = "numerics"

    def check(
        self, proposal: Proposal, graph: DataflowGraph, config: FusionConfig, device: DeviceSpec
    ) -> Verdict:
        why = _FORMS.get(proposal.option("form") or "")
        if config.numerics != "strict" or why is None or self._keeps(proposal, device):
            return ACCEPTED
        made = (t for name in proposal.operators for t in graph.by_name[name].outputs)
        dtypes = sorted({graph.tensors[t].dtype for t in made} & {*_NARROW})
        if not dtypes:
            return ACCEPTED
        return Verdict("illegal", self.reason, {"dtype": dtypes[0]}, f"numerics='strict': {why}")

    @staticmethod
    def _keeps(proposal: Proposal, device: DeviceSpec) -> bool:
        """On CPUs attention's scores are stored, and rounded."""
        return proposal.option("form") == "attention" and device.kind != "cuda"
