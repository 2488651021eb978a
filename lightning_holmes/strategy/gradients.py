"""A rank's gradients during a fit: gathered over microbatches, reduced, scaled, clipped; the pieces are optim's.

gradients.begin(last=True)                 # before a batch's microbatches; last: of an accumulation window
... backwards, with gradients.start_loss_scales(weights, accumulate)(), gradients as the runner's listener ...
gradients.end()                            # after them; p.grad is empty now
gradients.hand_over(last=True)             # inside Strategy.backward: p.grad is what the optimizer shall see
"""

import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.precision.amp import _optimizer_handles_unscaling
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_holmes.comm import dtensor
from lightning_holmes.comm.mesh import ProcessGroups, join_shared
from lightning_holmes.comm.queue import OnRun, make_comm_queue
from lightning_holmes.comm.sync_board import SyncBoard
from lightning_holmes.optim.clip import (
    clip_by_norm,
    clip_by_value,
    clip_parts_by_norm,
    clip_parts_by_value,
    global_grad_norm,
    norm_over_groups,
)
from lightning_holmes.optim.elementwise import Separability
from lightning_holmes.optim.grad_buffer import DEFAULT_BUCKET_BYTES, GradBuffer
from lightning_holmes.optim.grad_sync import GradSync
from lightning_holmes.optim.gradient_options import GRAD_DTYPES, GradientOptions
from lightning_holmes.optim.loss_scale import LossScale
from lightning_holmes.optim.param_gather import can_gather_lazily
from lightning_holmes.optim.replicated import check_replicated
from lightning_holmes.optim.sharded import ShardedOptimizer
from lightning_holmes.optim.sync_chooser import SyncChooser
from lightning_holmes.pipeline.anomaly import check_finite
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.pipeline.structure import BEFORE
from lightning_holmes.plan.plan import Plan
from lightning_holmes.plan.sync_choice import SyncChoice
from lightning_holmes.strategy.compat.replacements import Replacements

_SHARING_TRIALS, _SHARING_BYTES = 3, 4 * 2**20
_SHARING_BUDGET_S = 0.5  # no further trial after so many seconds
_LOOK_EVERY = 20  # windows between two looks at what other groups have changed


class Gradients:
    """The gradients of ``pipeline``'s parameters on this rank. All ranks make one, since it makes groups.

    Args:
        scaler: of ``precision="16-mixed"``, or None.
        flat: keep flat buffers even where nothing is reduced.
        board: where groups tell how they sum; None where there are no groups.
    """

    def __init__(
        self,
        pipeline: PipelineModule,
        groups: ProcessGroups,
        plan: Plan,
        device: torch.device,
        *,
        scaler: Any,
        options: GradientOptions | None = None,
        board: SyncBoard | None = None,
        flat: bool = False,
    ) -> None:
        options = options or GradientOptions()
        self._pipeline = pipeline
        self._groups = groups
        self._device = device
        self._board = board
        parameters = _in_backward_order(pipeline, plan)
        shared = _shared_between_stages(pipeline, plan)
        # what is neither reduced nor gathered in another type may stay the tensors that autograd makes
        low = any(p.dtype in (torch.bfloat16, torch.float16) for p in parameters.values())
        reduced = plan.data_parallel_size > 1 or bool(shared)
        split = any(map(dtensor.is_dtensor, parameters.values()))
        self._buffer = GradBuffer(
            parameters,
            flat=flat or reduced or split or (low and plan.placement.world_size > 1) or options.grad_dtype != "fp32",
            data_parallel_size=plan.data_parallel_size,
            bucket_bytes=DEFAULT_BUCKET_BYTES if options.bucket_bytes == "auto" else options.bucket_bytes,
            grad_dtype=GRAD_DTYPES[options.grad_dtype],
            apart={name: ranks for ranks, names in shared.items() for name in names},
        )
        self._queue = make_comm_queue(device)
        sync_groups = groups.gradients
        self._sync = GradSync(
            self._buffer,
            None,
            None if sync_groups is None else sync_groups.whole,
            self._queue,
            replicas=groups.data_parallel,
            shared_groups=join_shared(groups, plan.placement, list(shared)),
            stages_of=_local_stages(pipeline),
            stages=pipeline.stages,
        )
        self._chooser = None
        self._compresses = options.compression is not None
        if sync_groups is not None:
            self._chooser = SyncChooser(
                self._buffer,
                self._sync,
                sync_groups,
                self._queue,
                stages=pipeline.stages,
                collective=options.gradient_sync,
                compression=options.compression,
                powersgd_rank=options.powersgd_rank,
                sizes_buckets=options.bucket_bytes == "auto",
            )
        self._scale = None if scaler is None else LossScale(scaler, groups.pipeline, device)
        self._shards: ShardedOptimizer | None = None
        self._changes = Replacements()
        self._copies_checked = groups.tensor_parallel is None
        self._is_last = False
        self._unreduced: set[int] = set()  # stages of this batch whose gradients may still grow
        self._windows = 0
        self.choices: list[SyncChoice] = []
        """On rank 0: how each group sums its gradients, and what has changed since, in the order in which it was told."""

    def begin(self, *, last: bool) -> None:
        """Let the backwards of a batch add to what has been gathered; ``last``: the last batch of a window."""
        anew = not self._buffer.is_open
        if self._chooser is not None:
            self._chooser.before_window()
        self._buffer.begin()
        if self._shards is not None:
            self._shards.prepare()
        if anew and self._chooser is not None:
            choice = self._chooser.in_empty_window(self._windows)
            if choice is not None and self._board is not None and self._is_first_member:
                self._board.post(self._group_name, choice)
        self._is_last = last
        self._unreduced = set(self._pipeline.stages)
        self._sync.open(last=last and self._copies_checked)

    def end(self) -> None:
        """Take the gradients out of reach of ``zero_grad``, which Lightning calls between a step and its backward."""
        self._buffer.end()

    # the seam with the schedule (comm/exchange.py)

    def fetch(self, stage: int) -> None:
        """Nothing to bring: every replica has all parameters; after a sharded step whoever reads one waits for it."""

    def release(self, stage: int) -> None:
        """Nothing to let go."""

    def last_backward(self, stage: int) -> None:
        """The last backward of the batch through ``stage`` begins: buckets that it fills are reduced while it goes on."""
        self._sync.last_backward(stage)

    def reduce(self, stage: int) -> None:
        """It has ended. After the last one of this rank's stages everything that is left is reduced."""
        self._sync.backwards_done(stage)
        self._unreduced.discard(stage)
        if not self._unreduced and self._is_last and self._copies_checked:
            self._sync.start_grad_sync()

    def add(self, name: str, gradient: Tensor) -> None:
        """Gather a gradient that ``torch.autograd.grad`` has returned, and say that it has passed."""
        self._buffer.add(name, gradient)

    def start_loss_scales(self, weights: Sequence[float], accumulated: int) -> Callable[[], list[float]]:
        """Each microbatch's share of the mean over all samples of a batch, all replicas and ``accumulated`` batches.

        The ranks of the last stage call, all together; what is returned waits for the other replicas.
        """
        total = self._sync.start_sum_over_replicas(sum(weights), self._device)

        def finish() -> list[float]:
            samples = total()
            if samples == 0:
                return [0.0 for _ in weights]
            factor = 1.0 if self._scale is None else self._scale.factor()
            return [weight / samples / accumulated * factor for weight in weights]

        return finish

    def hand_over(self, *, last: bool) -> None:
        """Make what was gathered ``p.grad``; after the ``last`` batch of a window it is reduced first. All ranks call."""
        if not self._copies_checked:
            self._copies_checked = True
            check_replicated(self._buffer, self._groups.tensor_parallel, self._device)
            if last:
                self._sync.start_grad_sync()
        if last:
            self._sync.finish_grad_sync()
            self._windows += 1
            self._look_at_board()
        shards = self._shards
        self._buffer.assign_grads(last=last, shown=not last or shards is None or shards.whole_gradients)
        if last and shards is not None:
            shards.take_gradients(self._buffer.reached())
        if last and self._scale is None and torch.is_anomaly_enabled():
            held: Iterable[tuple[str, nn.Parameter]] = self._buffer.parameters.items()
            if shards is not None:
                held = ((piece.name, tensor) for piece, tensor in shards.pieces.items())
            found = ((name, dtensor.local_part(p.grad)) for name, p in held if p.grad is not None)
            check_finite(found, f"stage {', '.join(map(str, self._pipeline.stages))}")
        if last and self._scale is not None:
            self._scale.agree(self._buffer.parameters.values() if shards is None else shards.stepped())

    # a sharded optimizer

    def lay_out(self) -> GradBuffer:
        """Lay the buckets out now, before the first batch; all ranks must call."""
        self.begin(last=False)
        self.end()
        self._buffer.seal()
        self._buffer.assign_grads(last=True)
        return self._buffer

    def shard(
        self,
        optimizer: Optimizer,
        names: Sequence[Sequence[str]],
        found: Separability,
        *,
        whole_gradients: bool,
        master_weights: bool,
        plugin: "pl.plugins.Precision",
    ) -> ShardedOptimizer:
        """Shard ``optimizer`` over the replicas from now on, after :meth:`lay_out`; all ranks must call.

        Args:
            names: for each of its groups, those of this rank's parameters.
            whole_gradients: hooks of the user read ``p.grad``.
            plugin: whose scaler and hooks see the gradients.
        """
        module = self._pipeline.module
        sync_groups = self._groups.gradients
        shards = ShardedOptimizer(
            optimizer,
            names,
            self._buffer,
            None if sync_groups is None else sync_groups.whole,
            found,
            self._queue,
            replicas=self._groups.data_parallel,
            gather=self._gather_parts,
            whole_gradients=whole_gradients,
            lazily=can_gather_lazily(module),
            master_weights=master_weights,
        )
        shards.watch(module)
        self._shards = shards
        self._sync.shares = sync_groups is not None and not shards.whole_gradients
        scaler = getattr(plugin, "scaler", None)
        if self._scale is not None:
            shards.fill(self._device)
            self._scale = LossScale(
                scaler, self._groups.pipeline, self._device, shares_group=self._groups.data_parallel
            )
        self._surround_hooks(plugin, shards, scaler)
        return shards

    def measure_sharing(self) -> tuple[float, float, float]:
        """Seconds of summing all buckets, of summing each replica's share, and of gathering as much; the slowest
        replica's. After :meth:`lay_out`; buckets hold zeros. All ranks must call."""
        collective, sync_groups = self._sync.collective, self._groups.gradients
        buckets = self._buffer.buckets
        if collective is None or sync_groups is None or not buckets:
            return 0.0, 0.0, 0.0
        tensor = max((bucket.buffer for bucket in buckets), key=lambda b: b.numel())
        if not self._compresses:  # what compresses knows whole buckets only
            most = max(1, _SHARING_BYTES // tensor.itemsize // self._buffer.data_parallel_size)
            tensor = tensor[: most * self._buffer.data_parallel_size]
        agreed, group = torch.full((4,), math.inf, device=self._device), sync_groups.whole
        began = time.perf_counter()
        for _ in range(_SHARING_TRIALS):
            for place, function in enumerate((collective.sum, collective.scatter, collective.gather)):
                work = self._queue.start(functools.partial(function, tensor))
                work.wait()
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                agreed[place] = min(float(agreed[place]), work.seconds() or 0.0)
            agreed[3] = time.perf_counter() - began
            self._queue.start(lambda: dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)).wait()
            if float(agreed[3]) > _SHARING_BUDGET_S:
                break
        agreed *= sum(bucket.buffer.numel() for bucket in buckets) / max(1, tensor.numel())
        sum_s, scatter_s, gather_s, _ = agreed.tolist()
        return sum_s, scatter_s, gather_s

    def _gather_parts(self, tensor: Tensor) -> None:
        assert self._sync.collective is not None
        self._sync.collective.gather(tensor)

    def _surround_hooks(self, plugin: Any, shards: ShardedOptimizer, scaler: Any) -> None:
        """Let the hooks between backward and step see whole gradients where they read them, and change them."""
        own = plugin._after_closure

        def after_closure(model: Any, optimizer: Any) -> None:
            if scaler is not None and not _optimizer_handles_unscaling(optimizer):  # it has unscaled the pieces here
                for rest in shards.rest_of_whole():
                    rest.mul_(1.0 / scaler.get_scale())
                shards.note_shown()
            own(model, optimizer)
            shards.absorb()

        self._changes.replace(plugin, _after_closure=after_closure)

    def absorb(self) -> None:
        """Take over what hooks after the backward have made of ``p.grad``."""
        if self._shards is not None and self._is_last:
            self._shards.absorb()

    @property
    def _is_first_member(self) -> bool:
        return self._groups.data_parallel_rank == 0 and self._groups.tensor_parallel_rank == 0

    @property
    def _group_name(self) -> str:
        return str(self._groups.pipeline_rank)

    def _look_at_board(self) -> None:
        board = self._board
        if board is None or self._groups.builder.rank != 0:
            return
        if board.is_complete and self._windows % _LOOK_EVERY:
            return
        for choice in board.read():
            self.choices.append(choice)
            when = f"Before batch {choice.step}: " if choice.step else ""
            print(f"{when}{choice.describe()}", flush=True)

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The 2-norm over all stages of the gradients of ``parameters`` (this rank's), whole or sharded; all ranks must
        call."""
        owned = {id(p) for n, p in self._pipeline.module.named_parameters() if self._pipeline.is_owner(n)}
        shards = self._shards
        if shards is not None and not shards.shows_gradients:
            given = {id(p) for p in parameters}
            wanted = {n for n, p in self._buffer.parameters.items() if id(p) in given}
            return self._norm_of_pieces(lambda name: name in wanted)
        return global_grad_norm(
            parameters,
            counts=lambda p: id(p) in owned,
            pipeline_group=self._groups.pipeline,
            tensor_group=self._groups.tensor_parallel,
            device=self._device,
        )

    def _norm_of_pieces(self, wanted: Callable[[str], bool]) -> Tensor:
        """The 2-norm over stages, tensor groups and replicas of the gradients that the optimizers step with."""
        assert self._shards is not None
        tensor_group = self._groups.tensor_parallel
        first = tensor_group is None or self._groups.tensor_parallel_rank == 0
        parameters = self._buffer.parameters

        def counts(name: str) -> bool:
            split = dtensor.is_split(parameters[name])
            return wanted(name) and self._pipeline.is_owner(name) and (first or split)

        return norm_over_groups(
            list(self._shards.gradients(counts)),
            (self._groups.pipeline, tensor_group, self._groups.data_parallel),
            self._device,
        )

    def take_over_clipping(self, plugin: "pl.plugins.Precision") -> None:
        """Until :meth:`close`, Lightning's clipping by norm uses the norm over all stages, and knows of sharded gradients."""

        def clip_grad_by_norm(optimizer: Optimizer, clip_val: int | float) -> None:
            if self._shards is not None:
                self._shards.absorb()
                norm = self._norm_of_pieces(lambda name: True)
                clip_parts_by_norm(self._shards.clipped(), clip_val, norm)
                self._shards.note_shown()
                return
            parameters = [p for p in plugin.main_params(optimizer) if p.grad is not None]
            clip_by_norm(parameters, clip_val, self.norm(plugin.main_params(optimizer)))

        def clip_grad_by_value(optimizer: Optimizer, clip_val: int | float) -> None:
            if self._shards is not None:
                self._shards.absorb()
                clip_parts_by_value(self._shards.clipped(), clip_val)
                self._shards.note_shown()
            else:
                clip_by_value(list(plugin.main_params(optimizer)), clip_val)

        self._changes.replace(plugin, clip_grad_by_norm=clip_grad_by_norm, clip_grad_by_value=clip_grad_by_value)

    def watch(self, on_run: OnRun | None) -> None:
        """Tell when each bucket's gradients were summed, and its parameters gathered, as CommQueue.on_run says."""
        self._queue.on_run = on_run

    def close(self) -> None:
        """Let go of buffers, hooks and the queue, and leave the precision plugin as it was."""
        self._changes.close()
        if self._shards is not None:
            self._shards.close()
        self._buffer.close()
        self._queue.close()


def _in_backward_order(pipeline: PipelineModule, plan: Plan) -> dict[str, nn.Parameter]:
    """This rank's parameters in the order in which its backward finishes them: the last layers' first.

    With several stages on a rank, a parameter is finished with the first stage that reads it; at a place, and where no
    place is known, those that are defined last come first.
    """
    local = pipeline.local_parameters
    parameters = [(n, p) for n, p in pipeline.module.named_parameters() if n in local][::-1]
    structure = pipeline.structure
    if structure is not None:
        readers = structure.readers
        parameters.sort(key=lambda named: -min(readers.get(named[0]) or (BEFORE,)))
    return dict(parameters)


def _local_stages(pipeline: PipelineModule) -> dict[str, set[int]]:
    """For each parameter the stages of this rank that read it."""
    structure = pipeline.structure
    if structure is None:
        return {}
    return {
        name: set(structure.stages_of(pipeline.partition, name)) & set(pipeline.stages)
        for name in pipeline.local_parameters
    }


def _shared_between_stages(pipeline: PipelineModule, plan: Plan) -> dict[tuple[int, ...], list[str]]:
    """Parameters that several pipeline ranks hold: the ranks, and the names in the same order on all."""
    shared: dict[tuple[int, ...], list[str]] = {}
    if pipeline.structure is not None:
        for name in pipeline.structure.readers:
            stages = pipeline.structure.stages_of(plan.partition, name)
            ranks = tuple(sorted({plan.rank_of(stage) for stage in stages}))
            if len(ranks) > 1:
                shared.setdefault(ranks, []).append(name)
    return shared
