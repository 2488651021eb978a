"""CostModel: the durations, bytes and memory of every part of a step, for one way of running it.

It combines a model's costs, a topology's speeds and its devices into StepCosts, which the simulator runs. It decides
nothing: the search evaluates many layouts with it.

    costs = CostModel(model, network, devices=(find_device_type("A100-80GB"),) * 2, training=Training(batch_samples=512))
    layout = Layout(pipeline=2, tensor=1, data=16)
    run = RunShape(layout=layout, schedule="1f1b", num_microbatches=8, microbatch_samples=4)
    simulate(run.make_schedule(), costs.step_costs(run, partition))

Compute: a stage's work divided by the slowest speed among its devices and by the tensor-parallel size, plus a fixed time for
each matrix product, the memory traffic of the other operators, and fixed seconds. Tensor parallelism (Megatron-LM, arXiv
1909.08053): two all-reduces of a layer's output in its forward and two in its backward, never overlapped, and two more where
the module recomputes it; work and weights are sharded evenly; activations and memory traffic are sharded inside the attention and the
MLP only, and everywhere with sequence parallelism. Gradients: one all-reduce per stage over its replicas (with a sharded
optimizer a reduce-scatter, and an all-gather of the parameters), in two levels if the replicas lie in several clusters and that is
faster. Transfers that use a network card or a link between clusters
at the same time share its bandwidth. Bytes that processors carry (sockets) also take the rank's own time. If gradients are
compressed between clusters, all replicas of a stage that lies in several clusters send them compressed; other options for
gradients are in training.py. Memory of a rank: parameters, gradients and optimizer states of its stages, and activations held
for the microbatches in flight (memory.py). Not modelled: input pipelines, logging.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial

from lightning_holmes.plan.collective_cost import all_reduce_s, two_level_all_reduce_s
from lightning_holmes.plan.device_type import DeviceType
from lightning_holmes.plan.layer_cost import LayerCost, ModelCost
from lightning_holmes.plan.layout_facts import Devices, LayoutFacts, StageGroup
from lightning_holmes.plan.memory import RankMemory, lack_of_memory, stage_in_flight
from lightning_holmes.plan.node_costs import node_bytes_per_s
from lightning_holmes.plan.partition import Partition, make_uniform_partition
from lightning_holmes.plan.route import Network
from lightning_holmes.plan.run_shape import Layout, RunShape
from lightning_holmes.plan.schedule import spec_of
from lightning_holmes.plan.self_adapting import Balance
from lightning_holmes.plan.simulator import StepCosts
from lightning_holmes.plan.training import Training

NUM_WHOLE = 2
"""Stages of a rank that are unsharded at a time where parameters are sharded: the one that is computed, and the next."""

# The share of a transformer layer's memory traffic (matrix products excluded) that lies outside of the attention and the MLP, so that
# tensor parallelism does not divide it: 22 bytes per input element for two norms and two residual sums, against 16 inside (4x as wide)
_MOVED_WHOLE = 0.58

_SMALL_STATE = 64 * 2**20  # bytes a rank; sharding less is not worth its messages
_SHARDING_GAIN = 0.1  # the share of reduction and update that a sharded optimizer must save


class CostModel:
    """The costs of a model on a topology.

    Args:
        devices: the device type of each host, or of each cluster, in the order of the topology.
    """

    def __init__(
        self, model: ModelCost, network: Network, *, devices: Sequence[DeviceType], training: Training
    ) -> None:
        self.model, self.network, self.training = model, network, training
        if len(devices) == len(network.topology.clusters):
            devices = [devices[cluster] for cluster in network.cluster_of_host]
        assert len(devices) == len(network.hosts), (len(devices), len(network.hosts))
        self.host_devices = tuple(devices)
        self._devices = Devices(network, devices, memory_share=training.memory_share)
        self._facts: dict[Layout, LayoutFacts] = {}
        self._sharded: dict[Layout, bool] = {}
        self._models: dict[int, ModelCost] = {}

    @property
    def num_devices(self) -> int:
        """The number of devices of the topology."""
        return len(self.network.host_of_device)

    def microbatch_model(self, samples: int) -> ModelCost:
        """The model's costs for a microbatch of ``samples`` samples. Cached."""
        if samples not in self._models:
            self._models[samples] = self.model.for_samples(samples)
        return self._models[samples]

    def facts(self, layout: Layout) -> LayoutFacts:
        """The speeds, memory and routes of a layout on this topology. Cached."""
        if layout not in self._facts:
            shares = self.model.shared_bytes > 0 and layout.pipeline > 1
            self._facts[layout] = self._devices.facts(layout, ratio=self._activation_ratio, joins_ends=shares)
        return self._facts[layout]

    def with_training(self, training: Training) -> CostModel:
        """A copy with other training options. Memory limits keep the ``memory_share`` that this model was made with."""
        other = copy.copy(self)
        other.training, other._sharded = training, {}
        return other

    def with_sharded_parameters(self) -> CostModel:
        """A copy with parameters, gradients and optimizer states sharded over replicas."""
        return self.with_training(replace(self.training, sharded_parameters=True, sharded_optimizer=True))

    def speeds(self, layout: Layout) -> tuple[float, ...]:
        """Work per second of each pipeline rank: that of its slowest device, times the tensor-parallel size."""
        return tuple(speed * layout.tensor for speed in self.facts(layout).speeds)

    def shards_states(self, layout: Layout) -> bool:
        """Whether the optimizer's states are sharded over replicas. "auto": if they do not fit otherwise, or the reduction and the update are
        slower otherwise; for the uniform partition. Cached."""
        if layout not in self._sharded:
            wanted = self.training.sharded_optimizer
            self._sharded[layout] = self._would_shard(layout) if wanted == "auto" else wanted
        return self._sharded[layout]

    # seconds

    def layer_seconds(self, run: RunShape, rank: int, layer: LayerCost) -> tuple[float, float, float, float]:
        """Forward and backward seconds of a layer on a pipeline rank, and the tensor-parallel parts of both."""
        facts, tensor = self.facts(run.layout), run.layout.tensor
        reduction = 0.0
        if tensor > 1:
            channel, hosts, local = facts.tensor_channels[rank]
            reduction = all_reduce_s(
                layer.activation_bytes,
                local=local,
                channel=channel,
                local_size=max(1, tensor // hosts),
                num_hosts=hosts,
            )
        forward, backward = 2 * reduction, (4 if layer.recomputed else 2) * reduction
        own = self.place_seconds(run, rank, layer)
        return own[0] + forward, own[1] + backward, forward, backward

    def _both_seconds(self, run: RunShape, rank: int, layer: LayerCost) -> float:
        return sum(self.layer_seconds(run, rank, layer)[:2])

    def place_seconds(self, run: RunShape, rank: int, place: LayerCost) -> tuple[float, float]:
        """Forward and backward seconds of a layer, or of what runs before or after the layers, without transfers."""
        facts, tensor = self.facts(run.layout), run.layout.tensor
        speed, product_s, byte_s = facts.speeds[rank] * tensor, facts.product_s[rank], facts.byte_s[rank]
        # a gradient is read and added to the sum of the earlier microbatches, which is read and written
        added_s = place.trained_bytes / tensor * (1 + 2 * self.training.gradient_ratio) * byte_s
        whole = 0.0 if self.training.sequence_parallel else _MOVED_WHOLE
        byte_s *= whole + (1 - whole) / tensor
        return (
            place.forward / speed
            + place.fixed_forward_s
            + place.forward_products * product_s
            + place.forward_moved_bytes * byte_s,
            place.backward / speed
            + place.fixed_backward_s
            + place.backward_products * product_s
            + place.backward_moved_bytes * byte_s
            + added_s,
        )

    def balance(self, run: RunShape, *, limit_memory: bool = True) -> Balance:
        """The problem of assigning the layers for this run."""
        model = self.microbatch_model(run.microbatch_samples)
        facts, ranks = self.facts(run.layout), run.layout.pipeline
        rows: dict[Hashable, tuple[float, ...]] = {}
        seconds = []
        for rank in range(ranks):
            key = facts.kind(rank)
            if key not in rows:
                rows[key] = _row(model.layers, partial(self._both_seconds, run, rank))
            seconds.append(rows[key])
        in_flight = stage_in_flight(run.schedule, ranks, run.num_microbatches, run.num_chunks)
        layer_bytes = limits = None
        before_bytes = after_bytes = 0.0
        if limit_memory:
            memory = self.memory(run)
            byte_rows = {
                count: _row(model.layers, partial(memory.place_bytes, in_flight=count)) for count in set(in_flight)
            }
            layer_bytes = tuple(byte_rows[count] for count in in_flight)
            before_bytes = memory.place_bytes(model.before, in_flight[0])
            if ranks == 1:  # parameters that both ends use are counted with each of them
                before_bytes = max(0.0, before_bytes - memory.static_bytes(_shared_place(model)))
            after_bytes = memory.place_bytes(model.after, in_flight[-1])
            per_stage = -(-model.num_layers // (ranks * run.num_chunks))
            transient = NUM_WHOLE * per_stage * max(_row(model.layers, memory.whole_bytes))
            limits = tuple(max(0.0, most - transient) for most in facts.memory)
        return Balance(
            seconds=tuple(seconds),
            before_seconds=sum(self.place_seconds(run, 0, model.before)),
            after_seconds=sum(self.place_seconds(run, _stage_ranks(run)[-1], model.after)),
            num_chunks=run.num_chunks,
            layer_bytes=layer_bytes,
            before_bytes=before_bytes,
            after_bytes=after_bytes,
            limits=limits,
            forbidden_cuts=model.forbidden_cuts,
            v_shaped=spec_of(run.schedule).is_v_shaped,
        )

    def step_costs(self, run: RunShape, partition: Partition) -> StepCosts:
        """Everything that the simulator needs."""
        layout, training = run.layout, self.training
        model = self.microbatch_model(run.microbatch_samples)
        facts, ranks, last = self.facts(layout), layout.pipeline, partition.num_stages - 1
        sharded, memory = self.shards_states(layout), self.memory(run)
        where, parts = _stage_ranks(run), tuple(max(1, count) for count in partition.layer_counts)
        forward, backward, tensor_forward, tensor_backward = [], [], [], []
        activations, held, reduce, gather_of_stage, reduce_own, gather_own = [], [], [], [], [], []
        fetch, fetch_own = [], []
        # 1 for the slowest rank; Training's seconds are those of the slowest rank
        slower = [min(facts.speeds) / speed for speed in facts.speeds]
        byte_s = tuple(training.byte_s * part for part in slower)
        static, update, transient = [0.0] * ranks, [training.own_s * part for part in slower], [0.0] * ranks
        table = _shared_place(model)
        tied, whole_table = ranks == 1 and table.parameter_bytes > 0, memory.whole_bytes(table)
        whole: list[list[float]] = [[] for _ in range(ranks)]  # of each stage: unsharded bytes while it is computed
        known: dict[Hashable, tuple[float, float, float, float]] = {}
        for stage, rank in enumerate(where):
            own = partition.layers_of(stage)
            layers = [model.layers[index] for index in own]
            costs = []
            for layer in layers:
                key = (facts.kind(rank), id(layer))  # equal layers are one object
                if key not in known:
                    known[key] = self.layer_seconds(run, rank, layer)
                costs.append(known[key])
            sums = [math.fsum(cost[part] for cost in costs) for part in range(4)]
            places = list(layers)
            for at, place in ((0, model.before), (last, model.after)):
                if stage == at:
                    there = self.place_seconds(run, rank, place)
                    sums[0], sums[1] = sums[0] + there[0], sums[1] + there[1]
                    places.append(place)
            forward.append(sums[0])
            backward.append(sums[1])
            tensor_forward.append(sums[2])
            tensor_backward.append(sums[3])
            sent = model.layers[own.stop - 1] if own.stop else model.before  # whose output the stage sends on
            activations.append(sent.activation_bytes if stage < last else 0.0)
            held.append(math.fsum(memory.held_bytes(place) for place in places))
            trained = math.fsum(place.trained_bytes for place in places) / layout.tensor
            seconds, gathered = self._reduction(facts.groups[rank], trained, sharded)
            out, back = self._carried(facts.groups[rank], trained, sharded)
            reduce_own.append(out * byte_s[rank])
            gather_own.append(back * byte_s[rank])
            shared_s = self._shared_seconds(layout, facts) if stage in (0, last) else 0.0
            reduce.append(seconds + shared_s)
            gather_of_stage.append(gathered)
            if training.sharded_parameters:
                held_bytes = math.fsum(place.parameter_bytes for place in places) / layout.tensor
                fetch.append(self._gather(facts.groups[rank], held_bytes))
                fetch_own.append(self._carried(facts.groups[rank], held_bytes, sharded)[1] * byte_s[rank])
                ends = tied * ((stage == 0) + (stage == last))
                whole[rank].append(math.fsum(memory.whole_bytes(place) for place in places) - ends * whole_table)
            static[rank] += sum(memory.static_bytes(place) for place in places)
            update[rank] += self._update_s(facts, rank, trained) / (layout.data if sharded else 1)
        gather = [0.0] * ranks
        for stage, seconds in enumerate(() if training.sharded_parameters else gather_of_stage):
            gather[where[stage]] += max(seconds / parts[stage], seconds - forward[stage])  # beside the next forward
        # a rank's stages use NUM_WHOLE buffers in turn; each buffer is as large as the largest stage that uses it
        for rank, of_stages in enumerate(whole):
            transient[rank] += sum(max(of_stages[turn::NUM_WHOLE], default=0.0) for turn in range(NUM_WHOLE))
        if tied:  # the tied table is counted before and after the layers, but held once, for the whole step
            static[0] -= memory.static_bytes(table)
            transient[0] += whole_table
        half = tuple(training.split_ratio / 2 * seconds for seconds in backward)
        return StepCosts(
            forward_s=tuple(forward),
            backward_s=tuple(backward),
            backward_input_s=half,
            backward_weight_s=half,
            tensor_forward_s=tuple(tensor_forward),
            tensor_backward_s=tuple(tensor_backward),
            activation_bytes=tuple(activations),
            routes=facts.routes,
            message_s=training.message_s,
            byte_s=byte_s if training.byte_s else (),
            reduce_s=tuple(reduce),
            reduce_parts=parts,
            reduce_cards=tuple(facts.groups[rank].cards for rank in where),
            reduce_own_s=tuple(reduce_own),
            gather_own_s=() if training.sharded_parameters else tuple(gather_own),
            fetch_s=tuple(fetch),
            fetch_own_s=tuple(fetch_own),
            update_s=tuple(update),
            gather_s=tuple(gather),
            static_bytes=tuple(static),
            held_bytes=tuple(held),
            transient_bytes=tuple(transient),
        )

    def device_types(self) -> list[dict[DeviceType, int]]:
        """For each cluster, in the order of the topology, the number of devices of each type."""
        counts: list[dict[DeviceType, int]] = [{} for _ in self.network.topology.clusters]
        for cluster, host, device in zip(
            self.network.cluster_of_host, self.network.hosts, self.host_devices, strict=True
        ):
            counts[cluster][device] = counts[cluster].get(device, 0) + host.devices
        return counts

    def peak_flops_per_s(self) -> float:
        """The peak FLOP/s of all devices together."""
        return sum(d.peak_flops_per_s * count for of_cluster in self.device_types() for d, count in of_cluster.items())

    def memory(self, run: RunShape) -> RankMemory:
        """The memory model of the ranks of a run."""
        layout = run.layout
        return RankMemory(
            training=self.training, tensor=layout.tensor, shards=layout.data if self.shards_states(layout) else 1
        )

    # parts

    @property
    def _node_bytes_per_s(self) -> float:
        return node_bytes_per_s(self.network, self.training.optimizer_nodes)

    def _reduction(self, group: StageGroup, trained_bytes: float, sharded: bool) -> tuple[float, float]:
        """Seconds to reduce a stage's gradients, and to gather its parameters if the optimizer is sharded."""
        if self.training.optimizer_nodes:
            return trained_bytes * self.training.gradient_ratio / self._node_bytes_per_s, 0.0
        if group.local_size * group.num_hosts == 1 or trained_bytes == 0:
            return 0.0, 0.0
        ratio, scatters = self._gradient_ratio(group)
        num_bytes = trained_bytes * ratio
        whole, in_levels = group.all_reduce_s(num_bytes), math.inf
        if group.levels is not None and not self.training.sharded_parameters:
            levels = group.levels
            local_size = -(-group.local_size * group.num_hosts // (levels.num_clusters * levels.hosts_inside))
            inside_s = all_reduce_s(
                num_bytes,
                local=group.local,
                channel=levels.inside,
                local_size=max(1, local_size),
                num_hosts=levels.hosts_inside,
            )
            in_levels = two_level_all_reduce_s(
                inside_s,
                num_bytes,
                num_clusters=levels.num_clusters,
                bandwidth=levels.across_bytes_per_s,
                latency=group.channel.latency_s,
            )
        if not sharded:
            return min(whole, in_levels), 0.0
        # a reduce-scatter and an all-gather take half of an all-reduce each; parameters are gathered in their own type
        return min(whole / 2 if scatters else whole, in_levels), self._gather(group, trained_bytes)

    def _gather(self, group: StageGroup, num_bytes: float) -> float:
        """Seconds to all-gather num_bytes: half of an all-reduce. With optimizer nodes: to receive them."""
        if self.training.optimizer_nodes:
            return num_bytes / self._node_bytes_per_s
        if group.local_size * group.num_hosts == 1:
            return 0.0
        return group.all_reduce_s(num_bytes) / 2

    def _carried(self, group: StageGroup, trained_bytes: float, sharded: bool) -> tuple[float, float]:
        """Bytes that each host sends plus receives to reduce a stage's gradients, and to gather its parameters: an all-reduce
        over n hosts moves 2 (n-1)/n of its bytes each way, a reduce-scatter and an all-gather half of that each."""
        if self.training.optimizer_nodes:
            return trained_bytes * self.training.gradient_ratio, trained_bytes
        if group.num_hosts == 1:
            return 0.0, 0.0
        moved = 4 * (group.num_hosts - 1) / group.num_hosts * trained_bytes
        ratio, scatters = self._gradient_ratio(group)
        if not sharded:
            return moved * ratio, 0.0
        return moved * (ratio / 2 if scatters else ratio), moved / 2

    def _gradient_ratio(self, group: StageGroup) -> tuple[float, bool]:
        """Bytes of gradients that a group sums for each trained byte, and whether sharding halves them: compressed
        gradients are always all-reduced."""
        compressed = self.training.gradient_ratio_across if group.across else None
        return (self.training.gradient_ratio, True) if compressed is None else (compressed, False)

    def _update_s(self, facts: LayoutFacts, rank: int, trained_bytes: float) -> float:
        """Seconds of the optimizer's step for all of a rank's parameters; 0 with optimizer nodes, which run the step."""
        if self.training.optimizer_nodes:
            return 0.0
        return trained_bytes * self.training.update_s_per_byte * min(facts.speeds) / facts.speeds[rank]

    def _would_shard(self, layout: Layout) -> bool:
        if layout.data == 1:
            return False
        facts, training, model = self.facts(layout), self.training, self.model
        partition = make_uniform_partition(model.num_layers, layout.pipeline)
        known, whole_s, sharded_s = [], 0.0, 0.0
        for rank in range(layout.pipeline):
            places = [model.layers[index] for index in partition.layers_of(rank)]
            places += [model.before] * (rank == 0) + [model.after] * (rank == layout.pipeline - 1)
            weights = math.fsum(place.parameter_bytes for place in places) / layout.tensor
            trained = math.fsum(place.trained_bytes for place in places) / layout.tensor
            free = facts.memory[rank] / training.memory_share - weights - trained * training.gradient_ratio
            known.append((round(trained * training.state_ratio), round(free)))
            update_s = self._update_s(facts, rank, trained)
            whole_s = max(whole_s, self._reduction(facts.groups[rank], trained, False)[0] + update_s)
            in_shards = sum(self._reduction(facts.groups[rank], trained, True)) + update_s / layout.data
            sharded_s = max(sharded_s, in_shards)
        gains = sharded_s < whole_s * (1 - _SHARDING_GAIN)
        is_small = max(state_bytes for state_bytes, _ in known) < _SMALL_STATE
        return lack_of_memory(known) is not None or (gains and not is_small)

    def _shared_seconds(self, layout: Layout, facts: LayoutFacts) -> float:
        """Seconds to sum the gradients of tied embeddings between the first and the last pipeline rank; 0 if they are frozen."""
        trained = _shared_place(self.model).trained_bytes if layout.pipeline > 1 else 0.0
        if trained == 0:
            return 0.0
        assert facts.ends is not None
        slowest = max((seconds for _, seconds in facts.ends.hops), default=0.0)
        # an all-reduce of two moves the bytes of each device once each way
        return trained / layout.tensor * self.training.gradient_ratio * slowest + 2 * facts.ends.latency_s

    def _activation_ratio(self, first: int, second: int) -> float:
        """The share of an activation's bytes that is sent from one host to another; below 1 only between clusters."""
        same = self.network.cluster_of_host[first] == self.network.cluster_of_host[second]
        return 1.0 if same else self.training.activation_ratio_across


def _shared_place(model: ModelCost) -> LayerCost:
    """The parameters that are used both before and after the layers (a tied table): their bytes alone, without work."""
    shared = model.shared_bytes
    trained = min(shared, model.before.trained_bytes, model.after.trained_bytes)
    return LayerCost(forward=0.0, backward=0.0, parameter_bytes=shared, gradient_bytes=trained)


def _row(layers: Sequence[LayerCost], value: Callable[[LayerCost], float]) -> tuple[float, ...]:
    """value(layer) for each layer; computed once per distinct object, since equal layers of a ModelCost's copies are one object."""
    each: dict[int, float] = {}
    for layer in layers:
        if id(layer) not in each:
            each[id(layer)] = value(layer)
    return tuple([each[id(layer)] for layer in layers])


def _stage_ranks(run: RunShape) -> tuple[int, ...]:
    return spec_of(run.schedule).ranks_of(run.layout.pipeline, run.num_chunks)
