"""Run one batch through the pipeline: split it, run it, and bring its results to every rank.

This module does what happens around the runner: it compares the ranks' batches, sets weights and seeds of
microbatches, and returns outputs and logs from the last stage. The caller reduces the gradients.
"""

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_holmes.comm.label import labelled
from lightning_holmes.comm.p2p import P2P, TensorSpec
from lightning_holmes.errors import ConfigurationError, UnevenDataError, UnsupportedModuleError
from lightning_holmes.lightning_private import trainer_of
from lightning_holmes.pipeline import batch as batches
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.batch import BatchSplitter, microbatches_argument, splits_itself
from lightning_holmes.pipeline.checksum import Checksum
from lightning_holmes.pipeline.divisors import Divisors
from lightning_holmes.pipeline.module_state import ModuleState, to_host
from lightning_holmes.pipeline.outside import Outside
from lightning_holmes.pipeline.own_generators import OwnDraws, OwnGenerators, States, set_states, states_of
from lightning_holmes.pipeline.preserved_trainer import Settings, change_settings, changed_settings, settings_of
from lightning_holmes.pipeline.replay import MetricWindow, merge_calls
from lightning_holmes.pipeline.request import StepRequest, StepResult
from lightning_holmes.pipeline.runner import Batch, PipelineRunner, loss_of
from lightning_holmes.pipeline.seeds import derive_seed, preserved_random_state
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.pipeline.state_watch import RepeatedChanges
from lightning_holmes.pipeline.whole_steps import (
    CallsInParts,
    describe_compute,
    noticing_compute,
    noticing_loggers,
    refusing_loggers,
    refusing_metrics,
)
from lightning_holmes.plan.schedule import make_schedule, spec_of

TOPIC_BATCH = 3
TOPIC_CALLS = 4
TOPIC_RESULT = 5
_SHARDS = (
    "A data set that shards itself should do so not by the rank, but by the data-parallel coordinate, which "
    "lightning_holmes.data.data_parallel_coordinate() gives in its __iter__"
)


_Unseen = tuple[P2P, str, Checksum]


class StepDriver:
    """Runs batches through this rank's stages of a module.

    Args:
        pipeline: this rank's part of the module.
        p2p: transport to the other ranks of the pipeline; None if there are none. If ``pipeline`` is not divided, each
            rank runs the whole step, all on the same batch.
        schedule, num_chunks: the schedule of training steps; evaluation runs only its forwards.
        splitter: shared by all steps, since it learns from earlier batches.
        tensor_p2p: transport to the other ranks of the tensor-parallel group, which run the same stages on the same batches.
        state: the module's state, of which the last stage's results bring what the next step may read; None: it is not brought.
    """

    def __init__(
        self,
        pipeline: PipelineModule,
        p2p: P2P | None,
        *,
        schedule: str,
        num_chunks: int,
        device: torch.device,
        splitter: BatchSplitter | None = None,
        tensor_p2p: P2P | None = None,
        state: ModuleState | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.p2p = p2p
        self.tensor_p2p = tensor_p2p
        # schedules with chunks have no meaning for one stage on one rank
        alone = (p2p is None or p2p.size == 1) and num_chunks == 1 and spec_of(schedule).is_chunked
        self.schedule = "1f1b" if alone else schedule
        self.num_chunks = num_chunks
        self.device = device
        self.splitter = splitter or BatchSplitter()
        self._is_staged = p2p is not None and p2p.size > 1 and pipeline.num_stages > 1
        self._state = state if self._is_staged else None
        self.runner = PipelineRunner(pipeline, p2p if self._is_staged else None)
        self.module = module = self.runner.module
        self.is_inside_part = False
        """Whether only a part of a step is running: that of one of several pipeline ranks, or of one of several microbatches."""
        self._has_warned = self._has_warned_of_loggers = self._has_warned_of_changes = False
        self._metrics = {n: m for n, m in module.named_modules() if isinstance(m, Metric)}
        self._found = OwnGenerators(module)
        self._outside = Outside(module)
        self._calls = CallsInParts(pipeline)
        self._repeated = RepeatedChanges(module)

    @property
    def _generators(self) -> dict[str, Any]:
        return self._found.by_path

    @property
    def pipeline_parallel_size(self) -> int:
        """The number of ranks that run a step together."""
        return self.p2p.size if self.p2p is not None and self._is_staged else 1

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank runs the end of a step."""
        return self.pipeline.num_stages - 1 in self.pipeline.stages

    @property
    def last_rank(self) -> int:
        """The pipeline rank that runs the end of a step."""
        return spec_of(self.schedule).rank_of(self.pipeline.num_stages - 1, self.pipeline_parallel_size)

    def over(self, pipeline: PipelineModule) -> "StepDriver":
        """A driver like this one that runs the stages of ``pipeline``."""
        return StepDriver(
            pipeline,
            self.p2p,
            schedule=self.schedule,
            num_chunks=self.num_chunks,
            device=self.device,
            splitter=self.splitter,
            tensor_p2p=self.tensor_p2p,
        )

    def _other_ranks(self) -> list[int]:
        return [rank for rank in range(self.pipeline_parallel_size) if rank != self.last_rank]

    def run(self, request: StepRequest) -> StepResult:
        """Run one batch; every rank of the pipeline must call, with the same request apart from the batch."""
        place = f"{type(self.module).__name__}.{request.step_name}"
        trainer = trainer_of(self.module)
        self._found.look((request.step_name, None if trainer is None else trainer.current_epoch))
        with labelled(lambda: "holmes: wait for the ranks to agree on the batch"):
            whole, unseen = self._agree_on(request)
        splits = request.num_microbatches > 1
        count = min(request.num_microbatches, self._num_samples(whole) or request.num_microbatches) if splits else 1
        parts = self.splitter.split(whole, count, self.module)
        sizes = [self._num_samples(part, of_part=True) if splits else 1 for part in parts]
        weights = self.splitter.weights(parts, self.module, sizes)
        scales = request.loss_scales(weights) if request.loss_scales is not None and self.has_last_stage else None
        repeats = count > 1 or len(self.pipeline.stages) > 1  # this rank starts the step several times
        trainer = trainer if self._is_staged or repeats or request.fixes_options else None
        settings = None if trainer is None else settings_of(trainer, self.pipeline.flags)
        draws, is_in_parts = None, count > 1 or self.pipeline.num_stages > 1
        if self._generators and is_in_parts:
            draws = OwnDraws(place, self._generators, states_of(self._generators), splits=count > 1)
        divisors = Divisors(count) if request.trains and count > 1 and any(request.divisors) else None
        schedule = make_schedule(
            self.schedule,
            pipeline_parallel_size=self.pipeline_parallel_size,
            num_microbatches=count,
            num_chunks=self.num_chunks,
            forward_only=not request.trains,
        )
        batch = Batch(
            self.runner,
            request,
            parts,
            schedule,
            seeds=[derive_seed(request.seed, request.replica * count + index) for index in range(count)],
            scales=scales,
            settings=settings if repeats else None,
            fixed=settings if request.fixes_options else None,
            divisors=divisors,
            after_forwards=lambda: self._send_calls(draws),
        )
        structure = self.pipeline.structure
        window = MetricWindow(self.module, structure.step_metrics if structure is not None else (), count)
        self._expect_messages()
        self.is_inside_part = count > 1 or self.pipeline_parallel_size > 1
        guarded = self._metrics if count > 1 else {}
        self.pipeline.draws = draws
        is_known = structure is not None and structure.outside  # several microbatches then have a warning
        self.pipeline.outside = self._outside if (count > 1 or self._is_staged) and not is_known else None

        if self._state is not None and self.has_last_stage:
            self._state.begin_step()
        repeated = self._repeated if repeats else None
        if repeated is not None:
            repeated.begin_batch()
        self.pipeline.repeated = repeated

        def refuse_compute(metric: str) -> None:
            raise UnsupportedModuleError(describe_compute(place, metric))

        try:
            with (
                preserved_random_state(self.device),
                window.around_batch(),
                noticing_compute(guarded, refuse_compute),
                self._watching_loggers(place, count),
                refusing_metrics(place, self.runner.recorder.has_logged),
                self._calls.refusing(place) if is_in_parts else nullcontext(),
            ):
                self.runner.run(batch)
        finally:
            self.is_inside_part, self.pipeline.draws = False, None
            self.pipeline.outside = self.pipeline.repeated = None
        if repeated is not None and (found := repeated.end_batch(request.step_name)):
            self._tell_repeated(found[0], request, count)
        if is_in_parts:
            self._found.refuse_new(place, repeats=repeats)
        for each in unseen:
            self._compare_values(*each)
        if divisors is not None and self.has_last_stage:
            self._compare_divisors(request, divisors, weights)
        changed = changed_settings(trainer, self.pipeline.flags, settings) if settings and self._is_staged else None
        if settings is not None and not self.has_last_stage:  # a step may set back after its layers what it has changed
            change_settings(trainer, self.pipeline.flags, [{}, *settings[1:]])
        with labelled(lambda: "holmes: wait for the last stage's output"):
            return self._share(batch, sizes, weights, window, changed, draws)

    def agree(self, request: StepRequest) -> Any:
        """The batch that all ranks of the pipeline run for ``request``; all of them must call."""
        return self._agree_on(request)[0]

    def _agree_on(self, request: StepRequest) -> tuple[Any, list[_Unseen]]:
        """Agree on the batch that all ranks of a replica run: each its own, if these are equal, or (``broadcasts``)
        that of the replica's first rank. Also returns the checksums that are compared after the step has run, because
        their tensors are on an accelerator."""
        batch, unseen = request.batch, []
        axes = [("tensor", self.tensor_p2p if 0 in self.pipeline.stages else None), ("pipeline", self.p2p)]
        for axis, p2p in axes:
            if p2p is None or p2p.size == 1:
                continue
            checksum = None if request.broadcasts else Checksum(batch)
            batch = self._agree_over(p2p, axis, batch, checksum, request)
            if checksum is not None and checksum.has_values:
                unseen.append((p2p, axis, checksum))
            if p2p is self.tensor_p2p:
                p2p.finish()
        return batch, unseen

    def _compare_values(self, p2p: P2P, axis: str, checksum: Checksum) -> None:
        """Compare the checksums of tensors on accelerators; this happens before the optimizer step."""
        if p2p.rank == 0:
            for rank in range(1, p2p.size):
                p2p.send_message(rank, TOPIC_BATCH, checksum.values())
            p2p.finish()
        elif p2p.receive_message(0, TOPIC_BATCH) != checksum.values():
            raise _other_batch(p2p, axis)

    def _agree_over(self, p2p: P2P, axis: str, batch: Any, checksum: Checksum | None, request: StepRequest) -> Any:
        if p2p.rank == 0:
            message = tree.map_all_tensors(Tensor.cpu, batch) if checksum is None else checksum.known
            for rank in range(1, p2p.size):
                p2p.send_message(rank, TOPIC_BATCH, (message, request.is_last, states_of(self._generators)))
            return batch
        message, is_last, states = p2p.receive_message(0, TOPIC_BATCH)
        set_states(self._generators, states)
        if is_last != request.is_last:
            ends, goes_on = (p2p.rank, 0) if request.is_last else (0, p2p.rank)
            raise UnevenDataError(
                f"the data for {request.step_name} end unevenly: after this batch {axis} rank {ends} has no other, and {axis} "
                f"rank {goes_on} of the same replica has: every rank of it needs as many batches. {_SHARDS}"
            )
        if checksum is None:
            return tree.map_all_tensors(lambda t: t.to(self.device), message)
        if message != checksum.known:
            raise _other_batch(p2p, axis)
        return batch

    def _num_samples(self, batch: Any, of_part: bool = False) -> int:
        """The number of samples in a batch or a part of one; 0 if only the module's own ``split_batch`` can read it."""
        try:
            return self.splitter.batch_size(batch)
        except UnsupportedModuleError as reason:
            if not splits_itself(self.module):
                raise
            if not of_part or callable(getattr(self.module, "microbatch_weight", None)):
                return 0
            name = type(self.module).__name__
            raise UnsupportedModuleError(
                f"{name}.split_batch made microbatches whose number of samples cannot be told, so their losses cannot "
                f"be weighted: define {name}.microbatch_weight(batch), too, say the number of samples ({reason})"
            ) from None

    def _watching_loggers(self, place: str, num_microbatches: int) -> AbstractContextManager[None]:
        """Refuse loggers in a part of a step, and warn of them in one of several microbatches of a whole one."""

        def warn(name: str) -> None:
            if name not in ("save_dir", "log_dir", "root_dir", "name", "version") and not self._has_warned_of_loggers:
                self._has_warned_of_loggers = True
                warnings.warn(
                    f"{place} uses self.logger directly (.{name}), and runs once for each microbatch: the logger hears of each, not of the "
                    f"batch; use self.log, or num_microbatches=1",
                    stacklevel=2,
                )

        if self._is_staged:
            return refusing_loggers(self.module, place)
        return noticing_loggers(self.module, warn) if num_microbatches > 1 else nullcontext()

    def _expect_messages(self) -> None:
        """Post the receives of the messages that :meth:`_share` reads, so that they have arrived when the step ends."""
        p2p = self.p2p
        if p2p is None or not self._is_staged:
            return
        if self.has_last_stage:
            for rank in self._other_ranks():
                p2p.expect_message(rank, TOPIC_CALLS)
        else:
            p2p.expect_message(self.last_rank, TOPIC_RESULT)

    def _send_calls(self, draws: OwnDraws | None) -> None:
        """Send the log calls of this rank's stages, and what they have drawn, to the last stage, early enough that it does not wait."""
        if not self.has_last_stage:
            assert self.p2p is not None
            calls = [replace(c, value=tree.map_tensors(to_host, c.value)) for c in self.runner.recorder.calls]
            self.p2p.send_message(self.last_rank, TOPIC_CALLS, (calls, {} if draws is None else draws.before_layers))

    def _compare_divisors(self, request: StepRequest, divisors: Divisors, weights: list[float]) -> None:
        """Refuse a batch whose loss is a mean over other numbers of elements than the microbatches' weights, before the optimizer's step."""
        found = divisors.unshared(weights, request.divisors)
        if not found:
            return
        name, shown = type(self.module).__name__, ", ".join(f"{value:g}" for value in found)
        reason = (
            f"{request.step_name} of {name}: the loss of this batch divides by {shown} in microbatches of the weights "
            f"{', '.join(f'{weight:g}' for weight in weights)}: it is a mean over elements (targets that are not ignored, a mask) of which "
            f"not each sample has as many, and the trial at the run's start saw as many in each. Split, it is another loss than that of "
            f"the whole batch: use num_microbatches=1, or define `microbatch_weight(self, batch)`, the number of elements"
        )
        if request.refuses:
            raise UnsupportedModuleError(reason)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(reason, stacklevel=2)

    def _tell_repeated(self, name: str, request: StepRequest, count: int) -> None:
        """Refuse a batch of which several passes have changed a value of the module, before the optimizer's step."""
        passes, cure = f"each of {count} microbatches", f"{microbatches_argument(request.step_name)}=1"
        if count == 1:
            passes, cure = (
                f"each of {len(self.pipeline.stages)} stages on this rank",
                "num_chunks=1 with the default sharding",
            )
        reason = (
            f"{type(self.module).__name__}.{request.step_name} changes self.{name}, which it did not in the first batch: it runs once for "
            f"{passes}, where plain Lightning changes it once a batch; use {cure}, or change it in a hook (on_train_batch_start)"
        )
        if count == 1 or (request.refuses and request.trains):
            raise UnsupportedModuleError(reason)
        if not self._has_warned_of_changes:
            self._has_warned_of_changes = True
            warnings.warn(reason, stacklevel=2)

    def _share(
        self,
        batch: Batch,
        sizes: list[int],
        weights: list[float],
        window: MetricWindow,
        changed: Settings | None,
        draws: OwnDraws | None,
    ) -> StepResult:
        """Collect what earlier stages logged on the last stage, and bring its results, what it ``changed`` on the trainer, and the
        generators' states, to all ranks."""
        request, p2p, calls = batch.request, self.p2p, list(self.runner.recorder.calls)
        alone = not self._is_staged
        if not self.has_last_stage:
            assert p2p is not None
            last = self.last_rank
            mine, (template, specs, changed, drawn) = changed, p2p.receive_message(last, TOPIC_RESULT)
            unlike: set[tuple[int, bool]] = (mine or [{}, {}])[1].items() ^ (changed or [{}, {}])[1].items()
            flags = [self.pipeline.flags[index] for index, _ in unlike]
            parameter = next((part for part, name in flags if name == "requires_grad"), None)
            if parameter is not None:
                raise UnsupportedModuleError(
                    f"{type(self.module).__name__}.{request.step_name} sets requires_grad of {self.pipeline.names[id(parameter)]} in or after its "
                    f"layers, when other stages may be in their backward: do it before the layers, or in a hook such as on_train_batch_start"
                )
            change_settings(trainer_of(self.module), self.pipeline.flags, changed)
            set_states(self._generators, drawn)
            leaves = [torch.empty(spec.shape, dtype=spec.dtype, device=self.device) for spec in specs]
            p2p.broadcast(last, leaves)
            output, calls, kept = tree.unflatten(template, leaves)
            if self._state is not None and kept is not None:
                self._state.take(kept)
            return StepResult(output=tree.map_tensors(lambda t: t.to(self.device), output), calls=calls)
        if not alone:
            assert p2p is not None
            for rank in self._other_ranks():
                more, drawn = p2p.receive_message(rank, TOPIC_CALLS)
                calls += more
                if draws is not None:
                    draws.compare(drawn)
        end: States = {} if draws is None else draws.end
        set_states(self._generators, end)
        name = type(self.module).__name__
        losses = None
        if request.trains and weights != sizes:
            losses = [loss_of(o, request.step_name) for o in batch.outputs if o is not None]
            losses = losses if len(losses) == len(sizes) else None
        # settled on the last stage for all: only its step ran to the end, and so has updated every metric
        merged = merge_calls(window.settle(calls), sizes, weights, name, losses, request.merges)
        output = batches.merge_outputs(batch.outputs, sizes, weights, f"the output of {name}.{request.step_name}")
        if not alone:
            assert p2p is not None
            leaves, kept = [], None if self._state is None else self._state.of_step()

            def pack(tensor: Tensor) -> Any:
                """Pack a tensor into the message, except one on the device: it is broadcast separately, without
                waiting for its values."""
                if not p2p.broadcasts or tensor.device != self.device or tensor.layout is not torch.strided:
                    return to_host(tensor)
                leaves.append(tensor.detach().contiguous())
                return tree.Leaf(len(leaves) - 1)

            template = tree.map_tensors(pack, (output, merged, kept))
            specs = [TensorSpec(tuple(leaf.shape), leaf.dtype, False) for leaf in leaves]
            for rank in self._other_ranks():
                p2p.send_message(rank, TOPIC_RESULT, (template, specs, changed, end))
            p2p.broadcast(p2p.rank, leaves)
            p2p.finish()
        return StepResult(output=output, calls=merged)


def _other_batch(p2p: P2P, axis: str) -> ConfigurationError:
    return ConfigurationError(
        f"{axis} rank {p2p.rank} has another batch than {axis} rank 0 of the same replica: every rank of it "
        f"needs the same samples. {_SHARDS}, and random "
        f"augmentation should draw from torch's, NumPy's or Python's default generators. Where all ranks read the same samples and only "
        f"random numbers differ, broadcast_batch=True lets the first stage load and send; of data that shard themselves that would lose "
        f"what the other stages have read"
    )
