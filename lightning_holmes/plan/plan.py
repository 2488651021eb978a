"""Plan: all decisions about a run's layout. Frozen plain data that can be written to YAML and read back.

planner.py makes it. The strategy prints it at the start (tables.py) and saves it beside each checkpoint.

    plan.save("plan.yaml")
    assert Plan.load("plan.yaml") == plan
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from lightning_holmes.cluster.record import Text, YamlText, record, to_data
from lightning_holmes.errors import ConfigurationError
from lightning_holmes.plan.collective_choice import COLLECTIVE_NAMES, Sharding
from lightning_holmes.plan.groups import GroupPlan, Ranks
from lightning_holmes.plan.partition import Partition
from lightning_holmes.plan.placement import Placement
from lightning_holmes.plan.prediction import Prediction
from lightning_holmes.plan.schedule import ScheduleName, spec_of

WHOLE_MODULE = "(whole module)"
"""The value of Plan.layers for a module that is not split into layers."""

_Positive = Annotated[int, Field(ge=1)]


@record
@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanFile:
    """The content of a plan file; older files lack the last keys."""

    pipeline_parallel_size: _Positive
    data_parallel_size: _Positive
    num_microbatches: _Positive
    eval_num_microbatches: _Positive
    schedule: ScheduleName
    num_chunks: _Positive
    layers: Text
    partition: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    placement: Annotated[tuple[Ranks, ...], Field(min_length=1)]
    clusters: tuple[Text, ...]
    groups: tuple[GroupPlan, ...]
    notes: tuple[Text, ...]
    tensor_parallel_size: _Positive = 1
    sharding: Sharding = "none"
    collectives: tuple[Text, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The layout of a run: sizes, schedule, partition, placement and process groups.

    layers is the name of the layer list in the module. clusters has one entry per pipeline rank: the cluster
    of its ranks, or several joined by "+". sharding: what is sharded over the replicas of a stage. collectives: for each
    pipeline rank, how its replicas sum gradients; empty if there is one replica. notes explain each automatic choice in
    one line. prediction: of a training step, if costs are known; it is not written to the file.
    """

    pipeline_parallel_size: int
    data_parallel_size: int
    num_microbatches: int
    eval_num_microbatches: int
    schedule: str
    num_chunks: int
    layers: str
    partition: Partition
    placement: Placement
    clusters: tuple[str, ...]
    groups: tuple[GroupPlan, ...] = ()
    notes: tuple[str, ...] = ()
    tensor_parallel_size: int = 1
    sharding: Sharding = "none"
    collectives: tuple[str, ...] = ()
    prediction: Prediction | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        size = (self.placement.pipeline_parallel_size, self.placement.data_parallel_size)
        if size != (self.pipeline_parallel_size, self.data_parallel_size):
            raise ConfigurationError(
                f"the plan's placement is {size[0]} x {size[1]}, but pipeline_parallel_size="
                f"{self.pipeline_parallel_size} and data_parallel_size={self.data_parallel_size}"
            )
        if self.placement.tensor_parallel_size != self.tensor_parallel_size:
            raise ConfigurationError(
                f"the plan's placement has tensor groups of {self.placement.tensor_parallel_size}, but "
                f"tensor_parallel_size={self.tensor_parallel_size}"
            )
        if self.partition.num_stages != self.num_stages:
            raise ConfigurationError(
                f"the plan's partition has {self.partition.num_stages} stages, but pipeline_parallel_size x "
                f"num_chunks is {self.num_stages}"
            )
        unknown = set(self.collectives) - set(COLLECTIVE_NAMES)
        if unknown or len(self.collectives) not in (0, self.pipeline_parallel_size):
            raise ConfigurationError(
                f"the plan's collectives are {list(self.collectives)}; write one for each of the {self.pipeline_parallel_size} "
                f"pipeline ranks: {', '.join(COLLECTIVE_NAMES)}"
            )
        if len(self.clusters) != self.pipeline_parallel_size:
            raise ConfigurationError(
                f"the plan has {len(self.clusters)} entries in clusters; one per pipeline rank, that is "
                f"{self.pipeline_parallel_size}, are needed"
            )

    @property
    def num_stages(self) -> int:
        """The number of stages: pipeline ranks times chunks."""
        return self.pipeline_parallel_size * self.num_chunks

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.placement.world_size

    def stages_of(self, pipeline_rank: int) -> tuple[int, ...]:
        """The stages that a pipeline rank holds, one per chunk."""
        return spec_of(self.schedule).stages_of(pipeline_rank, self.pipeline_parallel_size, self.num_chunks)

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that holds a stage."""
        return spec_of(self.schedule).rank_of(stage, self.pipeline_parallel_size)

    def collective_of(self, pipeline_rank: int) -> str:
        """The collective by which the replicas of a pipeline rank sum gradients."""
        return self.collectives[pipeline_rank] if self.collectives else "all_reduce"

    def to_yaml(self) -> str:
        """YAML text that from_yaml_text reads back as an equal plan."""
        data: dict[str, Any] = {
            **{entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "prediction"},
            "partition": list(self.partition.layer_counts),
            "placement": [list(row) for row in self.placement.grid],
            "clusters": list(self.clusters),
            "groups": [to_data(group) for group in self.groups],
            "notes": list(self.notes),
            "collectives": list(self.collectives),
        }
        return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=110))

    @classmethod
    def from_yaml_text(cls, text: str, *, source: str = "plan") -> Plan:
        """Read a plan from YAML text. Raises ConfigurationError, which names the place of the mistake."""
        file = YamlText(text, source=source).read(_PlanFile)
        given = {entry.name: getattr(file, entry.name) for entry in fields(file)}
        try:
            placement = Placement(file.placement, file.tensor_parallel_size)
            return cls(**{**given, "partition": Partition(file.partition), "placement": placement})
        except ConfigurationError as error:
            raise ConfigurationError(f"{source}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write the plan to a file."""
        Path(path).write_text(self.to_yaml(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a file. Raises ConfigurationError if it cannot be read."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: bytes that are not UTF-8, or a path with a null character
            raise ConfigurationError(f"the plan file {path} cannot be read: {error}") from error
        return cls.from_yaml_text(text, source=str(path))
