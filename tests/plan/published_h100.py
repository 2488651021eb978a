"""Measurements of Llama 3.1 405B on H100s, and the cost model's predictions with that device type as it is.

This module owns the two rows of 8,192 tokens of table 4 in arXiv 2407.21783 (BF16 TFLOPS per GPU) and their
prediction. Nothing is fitted: the H100's share of peak is the one that `--device_type H100-80GB` assumes.

    for row in LLAMA_ROWS: print(row.gpus, row.tflops, predict_llama(row))

The paper says: 126 layers of 16,384 channels, 53,248 in the MLP, 128 heads with 8 for keys and values, 128,256 words;
tensor parallelism of 8 with sequence parallelism; an interleaved pipeline of 16, whose first and last stage have no
layer; FSDP of states and gradients, with parameters kept until the backward; no recomputation; gradients reduced in
fp32; one 400 Gbit/s RoCE card per GPU. Assumed: one layer per stage (16 ranks of 8 chunks, which gives 126 layers and
two stages without one), microbatches of one sequence, and that the paper counts the whole attention matrix and
computes its causal half.
"""

from __future__ import annotations

from dataclasses import dataclass

from published import language_model, of_products

from lightning_holmes.cluster.topology import Cluster, Host, Nic, Topology
from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.device_type import DEVICE_TYPES
from lightning_holmes.plan.layer_cost import ModelCost
from lightning_holmes.plan.partition import Partition
from lightning_holmes.plan.prediction import predict
from lightning_holmes.plan.route import REACHED, Network
from lightning_holmes.plan.run_shape import Layout, RunShape
from lightning_holmes.plan.training import Training

_LAYERS, _HIDDEN, _MLP, _KEYS, _WORDS, _TOKENS = 126, 16384, 53248, 1024, 128256, 8192
_TENSOR, _PIPELINE = 8, 16
# Of each element of a layer's input in half precision: two norms (read, written) and two sums of a residual (read twice, written); of each of
# the MLP's, SiLU and its product (two read, one written). The backward reads what these have read and written, and writes a gradient for each read.
_MOVED, _MOVED_MLP = 2 * 4.0 + 2 * 6.0, 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaRow:
    """One measurement. sequences: of a replica's batch; tflops: of the model's FLOPs, per GPU."""

    gpus: int
    sequences: int
    tflops: float


LLAMA_ROWS = (LlamaRow(gpus=8192, sequences=32, tflops=430), LlamaRow(gpus=16384, sequences=16, tflops=400))


def llama_cost() -> ModelCost:
    """Return the cost of Llama 3.1 405B in half precision, with one sequence per microbatch."""
    weights = 2 * _HIDDEN**2 + 2 * _HIDDEN * _KEYS + 3 * _HIDDEN * _MLP
    forward = _TOKENS * (2.0 * weights + 2.0 * _TOKENS * _HIDDEN)
    moved = _TOKENS * (_MOVED * _HIDDEN + _MOVED_MLP * _MLP)
    sizes = {"parameter_bytes": 2.0 * weights, "activation_bytes": 2.0 * _TOKENS * _HIDDEN}
    layer = of_products(forward, 9, moved, 2 * moved, held_bytes=_TOKENS * (12.0 * _HIDDEN + 6.0 * _MLP), **sizes)
    logits, table = 8.0 * _TOKENS * _WORDS, 2.0 * _WORDS * _HIDDEN
    head = of_products(_TOKENS * table, 1, logits, logits, parameter_bytes=table)
    return language_model(_LAYERS, layer, head, tokens=_TOKENS, name="Llama 3.1 405B")


def predict_llama(row: LlamaRow) -> float:
    """Return the cost model's TFLOPS per GPU, counted as in the paper."""
    device = DEVICE_TYPES["H100-80GB"]
    assert device.moved_bytes_per_s is not None
    cards = tuple(Nic(name=f"card{index}", kind="roce", bandwidth_bytes_per_s=400e9 / 8) for index in range(8))
    hosts = tuple(Host(name=f"h{index}", devices=8, nics=cards) for index in range(row.gpus // 8))
    data = row.gpus // (_TENSOR * _PIPELINE)
    costs = CostModel(
        llama_cost(),
        Network(
            Topology(clusters=(Cluster(name="all", hosts=hosts),)),
            local_bytes_per_s=device.local_bytes_per_s,
            efficiency=REACHED,
        ),
        devices=(device,),
        training=Training(
            batch_samples=row.sequences * data,
            gradient_ratio=2.0,
            state_ratio=6.0,
            sharded_optimizer=True,
            sequence_parallel=True,
            memory_share=1.0,
            update_s_per_byte=16 / device.moved_bytes_per_s,  # Adam in fp32: 32 bytes for each parameter of two bytes
        ),
    )
    chunks = (_LAYERS + 2) // _PIPELINE
    run = RunShape(
        layout=Layout(pipeline=_PIPELINE, tensor=_TENSOR, data=data),
        schedule="interleaved_1f1b",
        num_chunks=chunks,
        num_microbatches=row.sequences,
        microbatch_samples=1,
    )
    step_s = predict(costs, run, Partition((0, *(1,) * _LAYERS, 0))).step_s
    model = costs.model
    attention = 3 * 2.0 * _TOKENS**2 * _HIDDEN * _LAYERS  # the masked half is counted, but not computed
    flops = (model.forward + model.backward + attention) * row.sequences * data
    return flops / step_s / row.gpus / 1e12
