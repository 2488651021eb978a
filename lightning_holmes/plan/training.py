"""Training: the properties of a step that do not depend on the model: its batch, gradients and optimizer states.

make_training makes it from the strategy's arguments. Both `lightning-holmes plan` and a run call it, so that they predict the
same for the same configuration.

    training = make_training(Asked(compression="bf16"), model, batch_samples=512, device="cuda")
    training.gradient_ratio_across       # 0.5 for fp32 parameters

Assumed: the optimizer keeps two numbers for each parameter (AdamW) and can be sharded over replicas; no user hook
reads gradients, so that a replica receives the summed gradients of its shard only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_holmes.plan.asked import Asked
from lightning_holmes.plan.layer_cost import ModelCost, check_count

_MESSAGE_S = {"cpu": 150e-6, "cuda": 30e-6}  # seconds of a rank's own time to start a transfer
_SPLIT_RATIO = {"cpu": 1.2, "cuda": 1.1}
# A rank's time in a step outside of microbatches and the optimizer (the trainer's loops, data, logs, checks), in times of a tiny
# operator: about 15 ms if one takes 3 us. From the timelines of small runs on an idle link.
_STEP_OPERATORS = 5000
# A processor's time to send or receive a byte by sockets, including the slowdown of computing meanwhile, in times of a tiny
# operator: 2 ns if one takes 2 us. From processes that compute during a steady exchange, and from whole steps (docs/log.md).
_BYTE_OPERATORS = 1e-3
_STATES = 2.0  # numbers that AdamW keeps for each parameter
_FP32, _HALF = 4.0, 2.0  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The properties of a step that do not depend on the model.

    Attributes:
        batch_samples: samples of a step, over all replicas.
        gradient_ratio: bytes of the gradient buffer for each byte of trained parameters (2 for bf16 weights with
            fp32 gradients).
        gradient_ratio_across: bytes of compressed gradients that are sent for each byte of trained parameters if the replicas of a
            stage lie in several clusters; None without compression.
        activation_ratio_across: share of an activation's bytes that is sent from one cluster to another.
        state_ratio: bytes of optimizer states for each byte of trained parameters (2 for AdamW in the weights' type; 6 for
            bf16 weights with fp32 master weights and AdamW).
        least_state_ratio: the same for an optimizer without states: 0, or the ratio of fp32 master weights.
        sharded_optimizer: whether states and update are sharded over replicas; "auto": if a run would shard them
            (lack_of_memory).
        sharded_parameters: whether parameters and gradients are sharded, too; a stage is then gathered for its forwards and again for
            its backwards (arXiv 2106.02679).
        optimizer_nodes: number of nodes that hold parameters and optimizer states (LuWu, arXiv 2409.00918); ranks hold two stages at a
            time, and receive a stage from the nodes where they would gather it with sharded parameters. See node_costs.py.
        update_s_per_byte: seconds of the optimizer's step for each byte of trained parameters, on the slowest devices.
        message_s: seconds of a rank's own time to start a transfer.
        byte_s: seconds of the slowest rank's own time for each byte that it sends to or receives from another host, if
            processors carry them (sockets).
        own_s: seconds of the slowest rank's own time in a step outside of microbatches, transfers and the optimizer: loops, data, logs.
        split_ratio: seconds of a split backward for each second of a whole one. From GPT blocks: 1.0 to 1.24 on CPUs; assumed on GPUs.
        sequence_parallel: activations between tensor-parallel parts are sharded, too (Korthikanti et al. 2022).
        memory_share: share of a device's memory that a plan may use.
    """

    batch_samples: int
    gradient_ratio: float = 1.0
    gradient_ratio_across: float | None = None
    activation_ratio_across: float = 1.0
    state_ratio: float = 2.0
    least_state_ratio: float = 0.0
    sharded_optimizer: bool | Literal["auto"] = False
    sharded_parameters: bool = False
    optimizer_nodes: int = 0
    update_s_per_byte: float = 0.0
    message_s: float = 0.0
    byte_s: float = 0.0
    own_s: float = 0.0
    split_ratio: float = 1.0
    sequence_parallel: bool = False
    memory_share: float = 0.92

    def __post_init__(self) -> None:
        check_count(self.batch_samples, "batch_samples")


def make_training(
    asked: Asked,
    model: ModelCost,
    *,
    batch_samples: int,
    device: str,
    update_s_per_byte: float = 0.0,
    operator_s: float = 0.0,
    carries: bool = True,
) -> Training:
    """Make the Training of a run from the strategy's arguments.

    Args:
        batch_samples: of a step, over all replicas.
        device: "cpu" or "cuda".
        update_s_per_byte: as measured, for fp32 parameters.
        operator_s: seconds of a tiny operator, as measured.
        carries: whether processors carry what is sent (sockets).
    """
    weight = model.parameter_itemsize
    gradient = max(weight, _FP32)  # gradients of double-precision weights keep their type
    master = asked.master_weights and weight < _FP32  # fp32 weights are their own masters
    in_shards = asked.sharding == "parameters" or asked.optimizer_nodes > 0  # the search decides "auto"
    return Training(
        batch_samples=batch_samples,
        gradient_ratio=gradient / weight,
        gradient_ratio_across=min(_HALF, gradient) / weight if asked.compression else None,
        activation_ratio_across=min(1.0, _HALF / model.activation_itemsize) if asked.compression else 1.0,
        state_ratio=(1 + _STATES) * _FP32 / weight if master else _STATES,
        least_state_ratio=_FP32 / weight if master else 0.0,
        sharded_optimizer=master or in_shards or ("auto" if asked.sharding == "auto" else asked.sharding != "none"),
        sharded_parameters=in_shards,
        optimizer_nodes=asked.optimizer_nodes,
        update_s_per_byte=update_s_per_byte * (_FP32 / weight if master else 1.0),
        split_ratio=_SPLIT_RATIO.get(device, 1.0),
        message_s=_MESSAGE_S.get(device, _MESSAGE_S["cpu"]),
        byte_s=_BYTE_OPERATORS * operator_s * carries,
        own_s=_STEP_OPERATORS * operator_s,
    )
