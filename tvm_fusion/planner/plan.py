"""The plan: frozen dataclasses that are also the documented JSON schema (docs/plan-schema.md)."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from ..config import FLOAT32_PRODUCTS, NUMERICS, STRATEGIES
from ..errors import PlanError
from ..graph.dataflow import DTYPE_BYTES
from ..strategies.base import OPTIONS
from .schema import read

#: Version of the JSON schema.
SCHEMA = 1

#: Whose kernels a model is compiled to.
PIPELINES = ("tvm_fusion", "tvm", "untuned")


@dataclasses.dataclass(frozen=True)
class TargetInfo:
    """What the plan was made for."""

    kind: str
    arch: str | None = None
    device: str | None = None


@dataclasses.dataclass(frozen=True)
class Part:
    """What a compound group is made of, or a group that stood before and was absorbed.

    ``predicted_us`` is the time that the part would take as a kernel of its own.
    """

    strategy: str
    nodes: tuple[str, ...]
    predicted_us: float


@dataclasses.dataclass(frozen=True)
class Search:
    """How the groups were chosen.

    ``exact`` of the ``regions`` (sets of proposals that compete) were solved to the optimum of the
    predicted times, ``bounded`` within ``gap_us`` of it.
    """

    regions: int = 0
    exact: int = 0
    bounded: int = 0
    gap_us: float = 0.0


@dataclasses.dataclass(frozen=True)
class Group:
    """One group of the plan; its counts follow the graph after ``Canonicalize``.

    Bytes count a tensor once per kernel that reads or writes it, weights included; launches count
    one kernel per operator that does work; times are microseconds.
    """

    id: str
    strategy: str
    operators: tuple[str, ...]
    nodes: tuple[str, ...]
    depth: int
    members: int
    anchors: int
    branches: tuple[tuple[str, ...], ...]
    options: Mapping[str, str]
    parts: tuple[Part, ...] = ()
    flops_before: int = 0
    flops_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    intensity_before: float = 0.0
    intensity_after: float = 0.0
    launches_before: int = 0
    launches_after: int = 1
    predicted_us_before: float = 0.0
    predicted_us_after: float = 0.0
    measured_us_before: float | None = None
    measured_us_after: float | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    estimated_registers: int | None = None
    estimated_shared_bytes: int | None = None
    template: str | None = None
    evidence: str = "predicted"
    hot: bool = False
    priority: int = 0


@dataclasses.dataclass(frozen=True)
class Region:
    """One part of the model and the groups that serve it.

    ``kind`` is ``"serial"`` for one compound kernel, ``"parallel"`` for several kernels of
    different strategies.
    """

    kind: str
    groups: tuple[str, ...]
    name: str
    nodes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Rejection:
    """One edge, or set of branches, that stays unfused, and why."""

    strategy: str
    nodes: tuple[str, ...]
    outcome: str
    reason: str
    numbers: Mapping[str, Any]
    detail: str


@dataclasses.dataclass(frozen=True)
class Ungrouped:
    """One working operator that is a kernel of its own, and why.

    ``candidate`` marks an intensity under 10 FLOP/B, where fusion would pay.
    """

    node: str
    op: str
    reason: str
    candidate: bool = False


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over the whole model, grouped and not."""

    launches_before: int = 0
    launches_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    flops_before: int = 0
    flops_after: int = 0
    predicted_us_before: float = 0.0
    predicted_us_after: float = 0.0
    measured_us_before: float | None = None
    measured_us_after: float | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is fused, what is not, and why.

    Attributes
    ----------
    model, dtype : str
        Name and element type of the model.
    target : TargetInfo
        Target that costs were predicted for.
    operators : int
        Working operators in the canonical model.
    groups, regions, rejected, ungrouped : tuple
        The decisions.
    totals : Totals
        Sums over the model.
    preset : str
        Model family whose preset shaped the proposals.
    search : Search
        Which part of the choice is provably the best one.
    float32_products : str
        What products of float32 operands are computed in, one of ``config.FLOAT32_PRODUCTS``.
    pipeline : str
        One of ``PIPELINES``: whose kernels the model is compiled to. ``"tvm"``, TVM's default pipeline, where
        tuning measured it faster than any plan; there are no groups then. ``"untuned"``, those of this package
        without the records of a work dir, where tuning measured the model faster so.
    numerics : str
        Whether kernels round bfloat16 between their operators, one of ``config.NUMERICS``.
    schema : int
        Version of the JSON form.
    """

    model: str
    target: TargetInfo
    dtype: str
    operators: int
    groups: tuple[Group, ...] = ()
    regions: tuple[Region, ...] = ()
    rejected: tuple[Rejection, ...] = ()
    ungrouped: tuple[Ungrouped, ...] = ()
    totals: Totals = dataclasses.field(default_factory=Totals)
    preset: str = "auto"
    search: Search = dataclasses.field(default_factory=Search)
    float32_products: str = "float32"
    pipeline: str = "tvm_fusion"
    numerics: str = "wide"
    schema: int = SCHEMA

    @property
    def precision(self) -> str:
        """The least precise type that the model is computed in: ``"tf32"``, or `dtype`."""
        return self.float32_products if self.dtype == "float32" else self.dtype

    def group(self, group_id: str) -> Group:
        """Return the group of an id.

        Parameters
        ----------
        group_id : str
            As ``fused_vertical_3``.

        Raises
        ------
        PlanError
            If the plan has no such group.
        """
        for group in self.groups:
            if group.id == group_id:
                return group
        raise PlanError(
            f"the plan has no group {group_id!r}; its groups are {', '.join(g.id for g in self.groups)}"
        )

    def group_of(self, node: str) -> Group | None:
        """Return the group that holds a node, or None.

        Parameters
        ----------
        node : str
            Name of the node, as the plan's groups list it.
        """
        return next((g for g in self.groups if node in g.nodes), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values in schema order."""
        out = dataclasses.asdict(self)
        return {"schema": out.pop("schema"), **out}

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=False)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan.

        Parameters
        ----------
        text : str
            What ``to_json`` returned, or ``tvm-fusion plan --format json`` wrote.

        Raises
        ------
        PlanError
            If the text is not JSON or does not follow the schema.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as err:
            raise PlanError(
                f"the plan is not JSON ({err}); write it with `tvm-fusion plan --format json`"
            ) from err
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else None
            raise PlanError(
                f"the plan has schema {found!r}, this version reads schema {SCHEMA}; plan again"
            )
        plan = read(Plan, data, "plan")
        plan.check()
        return plan

    def check(self) -> None:
        """Check what types alone do not say.

        Raises
        ------
        PlanError
            If ids are unusable as function names or occur twice, or branches are not of their group.
        """
        if self.dtype not in DTYPE_BYTES:
            raise PlanError(f"the plan has the unknown dtype {self.dtype!r}; plan again")
        if self.float32_products not in FLOAT32_PRODUCTS:
            raise PlanError(
                f"the plan has the unknown float32_products {self.float32_products!r}; plan again"
            )
        if self.pipeline not in PIPELINES:
            raise PlanError(f"the plan has the unknown pipeline {self.pipeline!r}; plan again")
        if self.pipeline == "tvm" and self.groups:
            raise PlanError(
                "the plan has groups and TVM's own pipeline, which fuses none; plan again"
            )
        if self.numerics not in NUMERICS:
            raise PlanError(f"the plan has the unknown numerics {self.numerics!r}; plan again")
        ids = [group.id for group in self.groups]
        for group in self.groups:
            if not re.fullmatch(r"[A-Za-z_]\w*", group.id) or group.id == "main":
                raise PlanError(
                    f"{group.id!r} cannot be the id of a group; use one like fused_vertical_0"
                )
            if group.strategy not in STRATEGIES:
                raise PlanError(
                    f"the plan's {group.id} has the unknown strategy {group.strategy!r}; plan again"
                )
            known = all(v in OPTIONS.get(k, ()) for k, v in group.options.items())
            if not known:
                raise PlanError(
                    f"the plan's {group.id} has the unknown options {dict(group.options)}; plan again"
                )
            if ids.count(group.id) > 1:
                raise PlanError(f"the plan has two groups of the id {group.id!r}; plan again")
            inside = [node for branch in group.branches for node in branch]
            if not inside or not all(group.branches) or not set(inside) <= set(group.nodes):
                raise PlanError(
                    f"the branches of the plan's {group.id} are not of its nodes; plan again"
                )
            parts = {node for part in group.parts for node in part.nodes}
            if not parts <= set(group.nodes):
                raise PlanError(
                    f"the parts of the plan's {group.id} are not of its nodes; plan again"
                )
            if len(group.nodes) != len(group.operators):
                raise PlanError(f"the plan's {group.id} has other nodes than operators; plan again")

    def __str__(self) -> str:
        t = self.totals
        lines = [
            f"{self.model} ({self.precision}) on {self.target.kind}"
            + (f" {self.target.arch}" if self.target.arch else ""),
            f"  launches {t.launches_before} -> {t.launches_after}, "
            f"MiB moved {t.bytes_before / 2**20:.1f} -> {t.bytes_after / 2**20:.1f}, "
            f"predicted {t.predicted_us_before:.1f} -> {t.predicted_us_after:.1f} us",
        ]
        if self.pipeline == "tvm":
            lines.append("  compiled by TVM's default pipeline, which was measured faster")
        if self.pipeline == "untuned":
            lines.append("  planned and compiled as without tuning, which was measured faster")
        for g in self.groups:
            lines.append(
                f"  {g.id}: {' + '.join(g.operators)}"
                + (f" ({g.members} members, {g.options.get('form')})" if g.members > 1 else "")
            )
        lines += [f"  {u.node} ({u.op}): not fused, {u.reason}" for u in self.ungrouped]
        lines += [f"  {' | '.join(r.nodes[:4])}: {r.reason}: {r.detail}" for r in self.rejected]
        return "\n".join(lines)
