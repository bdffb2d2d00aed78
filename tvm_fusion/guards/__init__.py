"""Guards: proposal → verdict. One limit a file; every refusal carries a reason code and its numbers.

``registry`` lists the guards. The other files are what they, the cost model and the templates ask:

- what a group needs as one kernel: ``needs``, ``footprint``, ``tiling``, and for special forms ``two_anchors``,
  ``tensor_cores``, ``fma_products``, ``grouped_products``;
- for each kind of kernel its tiles and a model of their time: ``tensor_tiles``, ``warpgroup_tiles``, ``bulk_tiles``,
  ``tensor_rows``, ``split_tiles``, ``fma_tiles`` with ``fma_model``, ``attention_tiles``, ``strip_model``; ``clusters``
  and ``fastest`` are shared.

They stand here, before ``planner`` and ``schedules``, because both need them: one model predicts and chooses.
"""

from .base import ACCEPTED, Guard, Verdict
from .on_chip import Resources, judge_resources
from .registry import GUARDS, judge

__all__ = ["ACCEPTED", "GUARDS", "Guard", "Resources", "Verdict", "judge", "judge_resources"]
