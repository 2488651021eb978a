"""Prediction: time and memory of a step with one run shape and partition, by simulation.

prediction = predict(cost_model, run, partition)
prediction.step_s, prediction.samples_per_s, prediction.memory_bytes
"""

from dataclasses import asdict, dataclass
from typing import Any

from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.node_costs import NodeLoad, node_load
from lightning_holmes.plan.partition import Partition
from lightning_holmes.plan.run_shape import RunShape
from lightning_holmes.plan.simulator import StepCosts, simulate
from lightning_holmes.plan.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted time and memory of a step.

    Attributes:
        model_flops, hardware_flops: of a step, without and with what the module runs again.
        peak_flops_per_s: of all devices.
        memory_bytes, memory_limits: by pipeline rank.
        sharded_optimizer: whether the optimizer's states are sharded over replicas.
        sharded_parameters: whether parameters and gradients are, too.
        nodes: the load of each optimizer node; None without optimizer nodes.
        reason: why this plan was chosen, or in which respect it is worse than the chosen one.
    """

    run: RunShape
    partition: Partition
    timeline: Timeline
    costs: StepCosts
    batch_samples: int
    tokens_per_sample: int | None
    model_flops: float
    hardware_flops: float
    peak_flops_per_s: float
    memory_limits: tuple[float, ...]
    sharded_optimizer: bool = False
    sharded_parameters: bool = False
    nodes: NodeLoad | None = None
    reason: str = ""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.timeline.step_s

    @property
    def samples_per_s(self) -> float:
        """Samples a second, over all replicas."""
        return self.batch_samples / self.step_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second; None if the number of tokens of a sample is not known."""
        return None if self.tokens_per_sample is None else self.samples_per_s * self.tokens_per_sample

    @property
    def flops_per_s_per_device(self) -> float:
        """Hardware FLOP/s of a device, including recomputation, as in the tables of Megatron-LM and Holmes."""
        return self.hardware_flops / self.step_s / self.run.layout.num_devices

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: FLOP/s without recomputation, as a share of the devices' peak."""
        return self.model_flops / self.step_s / self.peak_flops_per_s

    @property
    def memory_bytes(self) -> tuple[float, ...]:
        """The peak memory of each pipeline rank in bytes."""
        return self.timeline.peak_memory_bytes

    def to_data(self) -> dict[str, Any]:
        """Plain data for JSON; docs/planning.md documents the keys."""
        layout = self.run.layout
        return {
            "pipeline_parallel_size": layout.pipeline,
            "tensor_parallel_size": layout.tensor,
            "data_parallel_size": layout.data,
            "schedule": self.run.schedule,
            "num_chunks": self.run.num_chunks,
            "num_microbatches": self.run.num_microbatches,
            "microbatch_samples": self.run.microbatch_samples,
            "sharded_optimizer": self.sharded_optimizer,
            "sharded_parameters": self.sharded_parameters,
            "optimizer_nodes": None if self.nodes is None else asdict(self.nodes),
            "partition": list(self.partition.layer_counts),
            "step_s": self.step_s,
            "samples_per_s": self.samples_per_s,
            "tokens_per_s": self.tokens_per_s,
            "flops_per_s_per_device": self.flops_per_s_per_device,
            "mfu": self.mfu,
            "bubble_share": self.timeline.bubble_share,
            "exposed_s": {axis: seconds / layout.pipeline for axis, seconds in self.timeline.exposed_s.items()},
            "memory_bytes": list(self.memory_bytes),
            "memory_limit_bytes": list(self.memory_limits),
            "reason": self.reason,
        }


def predict(cost_model: CostModel, run: RunShape, partition: Partition) -> Prediction:
    """Simulate a step with this run shape and partition."""
    costs = cost_model.step_costs(run, partition)
    model, training = cost_model.model, cost_model.training
    hardware = model.forward + model.backward
    samples = training.batch_samples / model.microbatch_samples
    flops = [work * samples for work in (hardware - model.recomputed, hardware)]
    return Prediction(
        run=run,
        partition=partition,
        timeline=simulate(run.make_schedule(), costs),
        costs=costs,
        batch_samples=training.batch_samples,
        tokens_per_sample=model.tokens_per_sample,
        model_flops=flops[0],
        hardware_flops=flops[1],
        peak_flops_per_s=cost_model.peak_flops_per_s(),
        memory_limits=cost_model.facts(run.layout).memory,
        sharded_optimizer=cost_model.shards_states(run.layout) and not training.optimizer_nodes,
        sharded_parameters=training.sharded_parameters and not training.optimizer_nodes,
        nodes=node_load(model, training, replicas=run.layout.data),
    )


def fits(entry: Prediction) -> bool:
    """Whether the predicted memory of every pipeline rank is within its limit."""
    return all(mine <= limit * (1 + 1e-9) for mine, limit in zip(entry.memory_bytes, entry.memory_limits, strict=True))
