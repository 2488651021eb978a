"""Published measurements, and the cost model's predictions of them.

This module owns the tables (TFLOPS per A100, hardware FLOPs with recomputation) with their sources, and the fit of
one constant: the share of peak that matrix products reach. Only the homogeneous InfiniBand rows of Holmes are used
for the fit; all other rows are predicted.

    fit = fit_efficiency()
    for row in predict_published(fit): print(row.row.name, row.predicted_tflops, row.error)
    for row in ZERO3_ROWS: print(row.name, predict_row(row, fit).error, predict_row(through_one_card(row), fit).error)

Set by physics, not by the rows: 1F1B of both systems waits for every transfer between stages at the place of the
transfer; before FlashAttention (2022) the scores of attention went through memory, _SCORE_FORWARD_BYTES and
_SCORE_BACKWARD_BYTES for each, at the rate of the data sheet.

Taken from the authors' scripts: both train with --fp16 and without --accumulate-allreduce-grads-in-fp32, so that
gradients are added and reduced in half precision, after the backward (github.com/CodexDive/Holmes, d8d2ac5,
examples/pretrain_gpt_2_nodes.sh; Megatron-LM of April 2021, 50a4b5f, examples/pretrain_gpt3_175B.sh and
megatron/arguments.py). The script for Holmes' model of 3.6 B has a global batch of 512, microbatches of 4 and
FlashAttention.

Assumed, since the sources do not say it: the tables' rows ran with that batch (the docs give the results of others);
one 200 Gbit/s InfiniBand or RoCE card and one 25 Gbit/s Ethernet card per host in Holmes (recalled); eight 200 Gbit/s
InfiniBand cards per host in Megatron-LM, with microbatches of 1 beyond 8 B and of 4 up to there, and pipelines that
are not interleaved; full recomputation. docs/predictions.md prints every error and says what this model cannot explain.

ZERO3_ROWS are the rows of SC21's table 2 for ZeRO-3 without model parallelism (DeepSpeed of 2021): a layer is
gathered for its forward and again for its backward, gradients are reduced in half precision at the same time, and
each GPU has one microbatch. This is predicted as this package's layered order with one microbatch. through_one_card
returns the same row with a host's eight GPUs sending through one of its cards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from blocking_sends import blocking_step_s

from lightning_holmes.cluster.topology import Cluster, Host, Nic, Topology
from lightning_holmes.plan.cost_model import CostModel
from lightning_holmes.plan.device_type import DEVICE_TYPES, DeviceType
from lightning_holmes.plan.layer_cost import LayerCost, ModelCost
from lightning_holmes.plan.route import REACHED, Network
from lightning_holmes.plan.run_shape import Layout, RunShape
from lightning_holmes.plan.search.comparison import assign_layers
from lightning_holmes.plan.training import Training

_GBIT = 1e9 / 8
# Of half-precision scores, counted: written by the product, read and written by softmax (fused with scale and mask) and by
# dropout (with a mask of a byte), read by the next product. The backward passes each of these twice.
_SCORE_FORWARD_BYTES, _SCORE_BACKWARD_BYTES = 13.0, 26.0
# Of each element of a layer's input, counted: two norms (read, written), two sums of bias, dropout and residual (read twice, written,
# and a mask of a byte), GeLU of four times as many (read, written); the bias of Q, K and V, which is written where the product adds to it,
# and attention's output, brought in order. Backward: the norms' gradients, and their weights' in a pass of its own, those of dropout, the
# sum of a residual's two gradients, GeLU's; what the sums for nine times as many elements of biases read, the gradients of Q, K and V put
# together, and attention's output again.
_MOVED_FORWARD_BYTES = 2 * 4.0 + 2 * 7.0 + 16.0 + 3 * 4.0 + 4.0
_MOVED_BACKWARD_BYTES = 2 * (6.0 + 4.0) + 2 * 5.0 + 2 * 6.0 + 24.0 + 9 * 2.0 + 3 * 4.0 + 4.0
# Of each logit: cross entropy in fp32 as Megatron-LM has it, pass by pass; backward the softmax's gradient, and to half precision.
_LOGIT_FORWARD_BYTES, _LOGIT_BACKWARD_BYTES = 34.0, 14.0
# Of each half-precision byte of parameters, pass by pass: gradients to fp32 (6 bytes of a parameter), scaled and looked at for what is not
# finite (8), their norm (4), Adam (28), and the masters to half precision (6). Megatron-LM's optimizer.py, for fp16.
_UPDATE_BYTES = 26.0
_BATCH = 512
Kind = Literal["infiniband", "roce", "ethernet"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """One measurement. tflops: hardware TFLOPS per GPU; bandwidth_bytes_per_s: of all cards of a host together;
    scores_in_memory: attention is not fused; fitted: the row may be used for the fit."""

    name: str
    hidden: int
    layers: int
    heads: int
    tensor: int
    pipeline: int
    hosts: int
    batch: int
    microbatch: int
    kind: Kind
    bandwidth_bytes_per_s: float
    tflops: float
    source: str
    scores_in_memory: bool = False
    fitted: bool = False
    sharded_parameters: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRow:
    """A measurement and its prediction. error: predicted over measured, minus one."""

    row: PublishedRow
    predicted_tflops: float

    @property
    def error(self) -> float:
        """The relative error, positive if the prediction is too fast."""
        return self.predicted_tflops / self.row.tflops - 1


def _holmes(hosts: int, kind: Kind, tflops: float, batch: int = _BATCH) -> PublishedRow:
    return replace(
        _megatron("3.6", 3072, 30, 32, 1, 2, 8 * hosts, batch, tflops),
        name=f"Holmes 3.6 B, {hosts} nodes, {kind}",
        kind=kind,
        bandwidth_bytes_per_s=(25 if kind == "ethernet" else 200) * _GBIT,
        source="arXiv 2312.03549",
        scores_in_memory=False,
        fitted=kind == "infiniband",
    )


def _megatron(
    billions: str,
    hidden: int,
    layers: int,
    heads: int,
    tensor: int,
    pipeline: int,
    gpus: int,
    batch: int,
    tflops: float,
) -> PublishedRow:
    return PublishedRow(
        name=f"Megatron-LM {billions} B, {gpus} GPUs",
        hidden=hidden,
        layers=layers,
        heads=heads,
        tensor=tensor,
        pipeline=pipeline,
        hosts=gpus // 8,
        batch=batch,
        microbatch=4 if float(billions) < 8 else 1,
        kind="infiniband",
        bandwidth_bytes_per_s=1600 * _GBIT,
        tflops=tflops,
        source="SC21, table 1",
        scores_in_memory=True,
    )


def _zero3(billions: str, hidden: int, layers: int, heads: int, gpus: int, batch: int, tflops: float) -> PublishedRow:
    row = _megatron(billions, hidden, layers, heads, 1, 1, gpus, batch, tflops)
    return replace(
        row,
        name=f"ZeRO-3 {billions} B, {gpus} GPUs",
        microbatch=batch // gpus,
        source="SC21 (arXiv 2104.04473), table 2",
        sharded_parameters=True,
    )


ZERO3_ROWS: tuple[PublishedRow, ...] = (
    _zero3("174.6", 12288, 96, 96, 384, 1536, 144),
    _zero3("174.6", 12288, 96, 96, 768, 1536, 88),
    _zero3("174.6", 12288, 96, 96, 1536, 1536, 44),
    _zero3("529.6", 20480, 105, 128, 640, 2560, 138),
    _zero3("529.6", 20480, 105, 128, 1120, 2240, 98),
    _zero3("529.6", 20480, 105, 128, 2240, 2240, 48),
)


def through_one_card(row: PublishedRow) -> PublishedRow:
    """Return the row with only one of each host's eight cards."""
    return replace(row, bandwidth_bytes_per_s=row.bandwidth_bytes_per_s / 8)


PUBLISHED_ROWS: tuple[PublishedRow, ...] = (
    _holmes(4, "infiniband", 197),
    _holmes(8, "infiniband", 148),
    _holmes(4, "roce", 160),
    _holmes(8, "roce", 145),
    _holmes(4, "ethernet", 122),
    _holmes(8, "ethernet", 83),
    _megatron("1.7", 2304, 24, 24, 1, 1, 32, 512, 137),
    _megatron("7.5", 4096, 36, 32, 4, 1, 128, 512, 142),
    _megatron("39.1", 8192, 48, 64, 8, 2, 512, 1536, 138),
    _megatron("145.6", 12288, 80, 96, 8, 8, 1536, 2304, 148),
    _megatron("529.6", 20480, 105, 128, 8, 35, 2520, 2520, 163),
)


def of_products(forward: float, products: int, moved: float, moved_back: float, **more: float) -> LayerCost:
    """Return the cost of a layer whose backward computes twice as much as its forward, with twice as many products; ``moved``: bytes."""
    return LayerCost(
        forward=forward,
        backward=2 * forward,
        forward_products=products,
        backward_products=2 * products,
        forward_moved_bytes=moved,
        backward_moved_bytes=moved_back,
        **more,
    )


def language_model(
    layers: int, layer: LayerCost, head: LayerCost, *, tokens: int, name: str, shared_bytes: float = 0.0
) -> ModelCost:
    """Return the cost of a table of words, equal layers and a head, with one sequence of ``tokens`` per microbatch."""
    table = LayerCost(
        forward=0.0, backward=0.0, parameter_bytes=head.parameter_bytes, activation_bytes=layer.activation_bytes
    )
    return ModelCost(
        microbatch_samples=1,
        before=table,
        layers=(layer,) * layers,
        after=head,
        shared_bytes=shared_bytes,
        tokens_per_sample=tokens,
        name=name,
    )


def gpt_cost(hidden: int, layers: int, *, vocabulary: int = 51200, sequence: int = 2048) -> ModelCost:
    """Return the cost of a GPT in half precision, with one sample per microbatch, by the usual formulas (SC21,
    section 5.1)."""
    forward = 24.0 * sequence * hidden**2 + 4.0 * sequence**2 * hidden
    values, logits, table = float(sequence * hidden), float(sequence * vocabulary), 2.0 * vocabulary * hidden
    # Korthikanti et al. 2022, table 2, without attention scores
    held = {"held_bytes": 34 * values, "undivided_bytes": 10 * values}
    sizes = {"parameter_bytes": 24.0 * hidden**2, "activation_bytes": 2 * values}
    layer = of_products(forward, 4, _MOVED_FORWARD_BYTES * values, _MOVED_BACKWARD_BYTES * values, **sizes, **held)
    moved, moved_back = _LOGIT_FORWARD_BYTES * logits, _LOGIT_BACKWARD_BYTES * logits
    head = of_products(2 * hidden * logits, 1, moved, moved_back, parameter_bytes=table, held_bytes=6 * logits)
    return language_model(layers, layer, head, tokens=sequence, name=f"GPT {hidden} x {layers}", shared_bytes=table)


def predict_row(row: PublishedRow, efficiency: float) -> PredictedRow:
    """Return the cost model's TFLOPS per GPU for a row."""
    base = DEVICE_TYPES["A100-80GB"]
    device: DeviceType = replace(base, efficiency=efficiency)
    cards = (Nic(name="card", kind=row.kind, bandwidth_bytes_per_s=row.bandwidth_bytes_per_s),)
    hosts = tuple(Host(name=f"h{index}", devices=8, nics=cards) for index in range(row.hosts))
    topology = Topology(clusters=(Cluster(name="all", hosts=hosts),))
    network = Network(topology, local_bytes_per_s=device.local_bytes_per_s, efficiency=REACHED)
    assert device.moved_bytes_per_s is not None
    training = Training(
        batch_samples=row.batch,
        gradient_ratio=1.0,
        state_ratio=6.0,
        sharded_optimizer=row.sharded_parameters,
        sharded_parameters=row.sharded_parameters,
        memory_share=1.0,
        update_s_per_byte=_UPDATE_BYTES / device.moved_bytes_per_s,
    )
    plain = gpt_cost(row.hidden, row.layers)
    model = with_recomputation(_with_scores(plain, row, device) if row.scores_in_memory else plain)
    costs = CostModel(model, network, devices=(device,), training=training)
    data = row.hosts * 8 // (row.tensor * row.pipeline)
    samples = row.batch // data
    run = RunShape(
        layout=Layout(pipeline=row.pipeline, tensor=row.tensor, data=data),
        schedule="breadth_first" if row.sharded_parameters else "1f1b",
        num_chunks=row.layers if row.sharded_parameters else 1,
        num_microbatches=samples // row.microbatch,
        microbatch_samples=row.microbatch,
    )
    partition = assign_layers(costs, run, "self_adapting", limit_memory=False)
    step_s = blocking_step_s(costs, run, partition)
    recomputed = with_recomputation(plain)
    flops = (recomputed.forward + recomputed.backward) * row.batch  # only the FLOPs that the tables count
    return PredictedRow(row=row, predicted_tflops=flops / step_s / (row.hosts * 8) / 1e12)


def with_recomputation(model: ModelCost) -> ModelCost:
    """Return the costs of a module that holds only the input of each layer, and runs its forward again in its backward."""
    again = [
        replace(
            layer,
            backward=layer.backward + layer.forward,
            backward_products=layer.backward_products + layer.forward_products,
            backward_moved_bytes=layer.backward_moved_bytes + layer.forward_moved_bytes,
            recomputed=layer.forward,
            held_bytes=layer.activation_bytes,
            undivided_bytes=layer.activation_bytes,
        )
        for layer in model.layers[:1]
    ]
    return replace(model, layers=tuple(again) * model.num_layers)


def hybrid_costs(hosts: int, efficiency: float, *, speeds: tuple[float, float] | None = None) -> CostModel:
    """Return the costs of Holmes' 3.6 B model on this many InfiniBand and as many RoCE hosts, which are equally fast,
    or compute whole layers at these FLOP/s."""
    device = replace(DEVICE_TYPES["A100-80GB"], efficiency=efficiency)
    assert device.moved_bytes_per_s is not None
    kinds: tuple[Literal["infiniband", "roce"], ...] = ("infiniband", "roce")
    topology = Topology(
        clusters=tuple(
            Cluster(
                name=kind,
                hosts=tuple(
                    Host(
                        name=f"{kind}{index}",
                        devices=8,
                        nics=(
                            Nic(name="card", kind=kind, bandwidth_bytes_per_s=200 * _GBIT),
                            Nic(name="eth", kind="ethernet", bandwidth_bytes_per_s=25 * _GBIT),
                        ),
                    )
                    for index in range(hosts)
                ),
            )
            for kind in kinds
        )
    )
    devices = [device, device]
    if speeds is not None:
        whole = {"efficiency": 1.0, "product_s": 0.0, "moved_bytes_per_s": None}
        devices = [replace(device, peak_flops_per_s=speed, **whole) for speed in speeds]
    return CostModel(
        with_recomputation(gpt_cost(3072, 30)),
        Network(topology, local_bytes_per_s=device.local_bytes_per_s, efficiency=REACHED),
        devices=devices,
        training=Training(
            batch_samples=_BATCH, state_ratio=6.0, update_s_per_byte=_UPDATE_BYTES / device.moved_bytes_per_s
        ),
    )


def _with_scores(model: ModelCost, row: PublishedRow, device: DeviceType) -> ModelCost:
    """Return the model with the time for moving attention scores through memory, expressed as work of the device."""
    assert device.moved_bytes_per_s is not None
    # the cost model divides work among all ranks of a tensor-parallel group, as the scores are
    work = row.heads * float(model.tokens_per_sample or 0) ** 2 / device.moved_bytes_per_s * device.flops_per_s
    layer = model.layers[0]
    slower = replace(
        layer,
        forward=layer.forward + _SCORE_FORWARD_BYTES * work,
        backward=layer.backward + _SCORE_BACKWARD_BYTES * work,
    )
    return replace(model, layers=(slower,) * model.num_layers)


def fit_efficiency(rows: Sequence[PublishedRow] = PUBLISHED_ROWS) -> float:
    """Return the constant with the least sum of squared relative errors on the rows that may be fitted; between 0.05
    and 1."""
    fitted = [row for row in rows if row.fitted]

    def loss(compute: float) -> float:
        return sum(predict_row(row, compute).error ** 2 for row in fitted)

    low, high = 0.05, 1.0
    for _ in range(5):  # a grid, refined
        grid = [low + (high - low) * step / 10 for step in range(11)]
        best = min(range(11), key=lambda index: loss(grid[index]))
        low, high = grid[max(0, best - 1)], grid[min(10, best + 1)]
    return (low + high) / 2


def predict_published(efficiency: float) -> tuple[PredictedRow, ...]:
    """Return every row with its prediction; row.fitted marks those that were fitted."""
    return tuple(predict_row(row, efficiency) for row in PUBLISHED_ROWS)
