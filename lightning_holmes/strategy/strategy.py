"""HolmesStrategy: Lightning's hooks, wired to the pieces that do the work. No algorithms here.

import lightning_holmes
Trainer(strategy="holmes", devices=4)
Trainer(strategy=HolmesStrategy(topology="topology.yaml", num_microbatches=8), devices=4)
"""

import functools
import gc
import os
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_holmes import checkpoint
from lightning_holmes.callbacks import ModuleStateSync
from lightning_holmes.callbacks.timeline_monitor import TimelineMonitor
from lightning_holmes.cluster.topology import Topology
from lightning_holmes.comm import dtensor
from lightning_holmes.comm.coordinate import publish_coordinate
from lightning_holmes.comm.sync_board import SyncBoard
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_private import SUMMARY, optimizers_to_device, prints_summary, reset_optimizers
from lightning_holmes.optim.elementwise import Separability
from lightning_holmes.optim.reducer import GradientReducer
from lightning_holmes.optim.sharded import ShardedOptimizer
from lightning_holmes.pipeline.batch import BatchSplitter
from lightning_holmes.pipeline.module_state import ModuleState
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.pipeline.steps import StepDriver
from lightning_holmes.plan.schedule import ScheduleName
from lightning_holmes.plan.sync_choice import SyncChoice
from lightning_holmes.strategy import admission, agreement, sharding
from lightning_holmes.strategy.building import ModuleBuilder
from lightning_holmes.strategy.compat.averaging import WeightAverages
from lightning_holmes.strategy.compat.clipping import clipping
from lightning_holmes.strategy.compat.extra_callbacks import extra_callbacks
from lightning_holmes.strategy.compat.finetuning import ParameterGroups
from lightning_holmes.strategy.compat.grad_norm import GradNormExchange
from lightning_holmes.strategy.compat.metrics import ReplicaMetrics
from lightning_holmes.strategy.compat.replacements import Replacements
from lightning_holmes.strategy.compat.signals import BatchSignals
from lightning_holmes.strategy.gradients import make_gradients
from lightning_holmes.strategy.options import Options, ProfileKind
from lightning_holmes.strategy.planning import PlanningStrategy
from lightning_holmes.strategy.split_trial import SplitTrial
from lightning_holmes.torch_private import default_store


class HolmesStrategy(PlanningStrategy):
    """Trains an ordinary LightningModule as a pipeline across clusters, replicated inside them.

    Args:
        topology: which devices form which cluster: a YAML file (see ``lightning_holmes.cluster.topology``), a
            ``Topology``, or "auto": found at the start; all devices of one host are one cluster.
        pipeline_parallel_size: ranks of one pipeline; "auto" is the number of clusters.
        tensor_parallel_size: ranks of a host that share each layer among them. The module shares its layers out in
            ``configure_model``, by torch's ``parallelize_module`` over ``self.device_mesh["tensor_parallel"]``.
        num_microbatches: into how many parts each training batch of a replica is assigned; "auto" is the number with the
            fastest predicted step, and 1 without a pipeline.
        eval_num_microbatches: likewise for validation, test and prediction. "auto" is 1: a whole batch at once,
            exact for any step.
        schedule: "1f1b", "eager_1f1b", "gpipe", "interleaved_1f1b", "eager_interleaved_1f1b", "zero_bubble" (backwards split into that of the input
            and that of the weights, which fill the bubble), "eager_zero_bubble", "zero_bubble_v" (the same, with two stages a
            rank, down the ranks and back up), or "auto": interleaved if ``num_chunks`` is above 1; else the one whose step is
            predicted to be the fastest, without gpipe, and from the third batch on with a split backward if the first two
            show that to be faster.
        num_chunks: stages of each rank; "auto" is 1 unless an interleaved schedule is chosen.
        partition: "self_adapting": layers are assigned so that the slowest stage is as fast as it can be, by the costs of the
            layers, with what runs before and after them, and the speeds of the hosts, and moved where that makes the
            simulated step faster; "proportional": in proportion to
            these speeds; "uniform": by count; or the number of layers of each stage.
        plan: a plan file of another run (its plan.yaml), which decides all of these, and is refused where it was made for
            other clusters or another module.
        profile: where the costs come from: "flops" counts them, "measure" times the layers on every rank; "auto" measures
            on several hosts without GPUs, and counts elsewhere.
        layers: the name of the module's layer list, an nn.ModuleList or nn.Sequential; "auto" finds it.
        broadcast_batch: the first stage of a replica loads its batches and sends them to the other stages,
            for data that cannot be loaded alike on several ranks.
        save_distributed_checkpoint: write each checkpoint as a folder, every rank its part; False: as one file that
            plain Lightning reads. "auto" is True for more than one process. Either is read in any layout.
        async_checkpoint: copy the state, and write it while training goes on.
        gradient_sync: how gradients are summed over replicas: "all_reduce", "reduce_scatter", "p2p" or "hierarchical";
            "auto" measures which is the fastest for each group (see docs/gradient-sync.md).
        bucket_bytes: of gradients that are summed together while the backward goes on; "auto" measures the link.
        grad_dtype: in which gradients gather: "fp32", "bf16", or None for the parameters' own type. Double precision
            stays.
        compression: of gradients that cross between clusters: "bf16", "fp16" or "powersgd", with ``powersgd_rank``
            columns; not exact.
        activation_dtype: "bf16": activations and their gradients cross between clusters rounded to it; not exact.
        sharded_optimizer: each replica keeps its share of the optimizer's state, and updates its share of the parameters.
            "auto": where the whole state does not fit, or is slower by what is measured (see docs/sharded-optimizer.md).
        master_weights: with precision="bf16-true", let the optimizer step fp32 weights, from which parameters are rounded.
        monitor: note when each rank computes, waits and communicates; at the end of fit the timeline of a step is written
            into the run's folder (see ``lightning_holmes.callbacks.timeline_monitor``). A number: also every so many steps.
        process_group_backend: "gloo" or "nccl"; None chooses by device.
        timeout: of collectives and transfers.
        port_range: the first and the last port that a firewall between hosts leaves open. What this package listens on
            keeps to it; gloo and NCCL take ports of the kernel's range, which must then lie within.

    Raises:
        ConfigurationError: an argument that is impossible by itself; later, one that does not fit the run.
    """

    strategy_name = "holmes"

    def __init__(
        self,
        *,
        topology: str | Topology = "auto",
        pipeline_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int = 1,
        num_microbatches: int | Literal["auto"] = "auto",
        eval_num_microbatches: int | Literal["auto"] = "auto",
        schedule: Literal["auto", ScheduleName] = "auto",
        num_chunks: int | Literal["auto"] = "auto",
        partition: Literal["self_adapting", "proportional", "uniform"] | list[int] = "self_adapting",
        profile: ProfileKind = "auto",
        plan: str | None = None,
        layers: str = "auto",
        broadcast_batch: bool = False,
        save_distributed_checkpoint: bool | Literal["auto"] = "auto",
        async_checkpoint: bool = False,
        gradient_sync: str = "auto",
        bucket_bytes: int | Literal["auto"] = "auto",
        grad_dtype: Literal["fp32", "bf16"] | None = "fp32",
        compression: Literal["bf16", "fp16", "powersgd"] | None = None,
        powersgd_rank: int = 2,
        activation_dtype: Literal["bf16"] | None = None,
        sharded_optimizer: bool | Literal["auto"] = "auto",
        master_weights: bool = False,
        monitor: bool | int = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        port_range: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(
            Options(
                topology=topology,
                pipeline_parallel_size=pipeline_parallel_size,
                tensor_parallel_size=tensor_parallel_size,
                num_microbatches=num_microbatches,
                eval_num_microbatches=eval_num_microbatches,
                schedule=schedule,
                num_chunks=num_chunks,
                partition=partition,
                profile=profile,
                plan=plan,
                layers=layers,
                broadcast_batch=broadcast_batch,
                save_distributed_checkpoint=save_distributed_checkpoint,
                async_checkpoint=async_checkpoint,
                gradient_sync=gradient_sync,
                bucket_bytes=bucket_bytes,
                grad_dtype=grad_dtype,
                compression=compression,
                powersgd_rank=powersgd_rank,
                activation_dtype=activation_dtype,
                sharded_optimizer=sharded_optimizer,
                master_weights=master_weights,
                monitor=monitor,
                process_group_backend=process_group_backend,
                timeout=timeout,
                port_range=port_range,
            )
        )
        self._monitor = self._options.make_monitor()
        self._shards = None
        self._ended: PipelineModule | None = None
        self._parameter_groups: ParameterGroups | None = None
        self._signals: BatchSignals | None = None
        self._changes = Replacements()  # of Lightning's and the user's objects, while a run lasts
        self._base_seed = 0
        self._splitter = BatchSplitter()

    # start

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Run ``configure_model`` without giving its tensors memory: a rank later builds those that it holds.

        Where it cannot run so (it reads weights by code of its own, say) it runs again, for real.
        """
        module = self.lightning_module
        assert module is not None
        if self.world_size > 1:
            agreement.share_generators()
        self._builder = self._make_builder()
        with self._builder.configuring(module, self.precision_plugin.module_init_context):
            yield

    def _make_builder(self) -> ModuleBuilder:
        return ModuleBuilder(lambda: self.broadcast(agreement.choose_seed()), self.root_device)

    def setup(self, trainer: "pl.Trainer") -> None:
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        with self._explaining():
            self._setup(trainer)

    def _setup(self, trainer: "pl.Trainer") -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._align_ranks(trainer, fitting)
        self._make_pipeline(trainer, fitting)
        assert self._pipeline is not None and self._groups is not None and self._plan is not None
        if fitting:
            self._make_optimizers(trainer)
        else:
            self._pipeline.install()
            self.setup_precision_plugin()
        self._driver = StepDriver(
            self._pipeline,
            self._groups.p2p,
            schedule=self._plan.schedule,
            num_chunks=self._plan.num_chunks,
            device=self.root_device,
            broadcast_batch=self._options.broadcast_batch,
            splitter=self._splitter,
            tensor_p2p=self._groups.tensor_p2p,
        )
        if fitting and self._plan.pipeline_parallel_size > 1:
            self._show_whole_module_to_callbacks(trainer)
            self._trial = (
                SplitTrial(self._plan, self._driver, self.root_device) if self._options.chooses_schedule else None
            )
        self._follow_trainer(trainer)

    def _align_ranks(self, trainer: "pl.Trainer", fitting: bool) -> None:
        """Refuse what cannot be run; the same module, seed and random state on every rank."""
        module = self.lightning_module
        assert module is not None and self.model is not None
        assert self._placement is not None and self._groups is not None and self._job is not None
        is_pipeline = self._placement.pipeline_parallel_size > 1
        admission.check_module(module, fitting=fitting, is_pipeline=is_pipeline)
        if fitting:
            admission.check_run(module, trainer, is_pipeline=is_pipeline)
        admission.check_tensor_parallel(module, trainer, self._options.plan_options.tensor_parallel_size)
        builder = self._builder = self._builder or self._make_builder()
        builder.adopt(module)
        agreement.compare_ranks(agreement.module_facts(module), self.world_size)
        with builder.building():
            self.model = self.precision_plugin.convert_module(self.model)
            self.model_to_device()
        self._base_seed = self.broadcast(agreement.choose_seed())
        if fitting and self._saved_seed is not None:  # dropout goes on as before the checkpoint
            self._base_seed = self._saved_seed
        self._saved_seed = None
        dtensor.check_axes([*module.named_parameters(), *module.named_buffers()], self._job.device_mesh)
        place = self._placement.coordinate(0)
        agreement.broadcast_module(module, self.world_size, self._groups, place[:2])
        agreement.share_random_state(self._groups)

    def _make_pipeline(self, trainer: "pl.Trainer", fitting: bool) -> None:
        """Learn how the module runs, plan the run, and keep what this rank holds."""
        module, layout, builder = self.lightning_module, self._layout, self._builder
        assert module is not None and layout is not None and builder is not None
        assert self._placement is not None and self._groups is not None
        samples = self._samples(trainer)
        traced = self._trace(samples)
        clusters = [cluster.name for cluster, _ in layout.topology.places()]
        notes = self._options.gradient_options.notes(self._placement, clusters) if fitting else []
        self._options.check_given_plan(
            layout.topology, world_size=self.world_size, structure=traced.structure, module=module
        )
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        predicts = self._monitor is not None or any(isinstance(c, TimelineMonitor) for c in callbacks)
        self._runtime_plan = self._decide(samples.get("training_step"), traced, predicts=predicts, notes=notes)
        self._plan = self._runtime_plan.plan
        self._pipeline = PipelineModule(
            module,
            traced.structure,
            self._plan.partition,
            self._plan.stages_of(self._groups.pipeline_rank),
            self.root_device,
        )
        builder.fill(self._pipeline, rank=self.global_rank, overwritten=self._saved_weights is not None)
        self._load_saved_weights()
        self._print_plan()

    def _make_optimizers(self, trainer: "pl.Trainer") -> None:
        """The user's optimizers over what this rank holds, and the gradients that they are given."""
        assert self._pipeline is not None and self._groups is not None and self._plan is not None
        assert self._job is not None
        module = self.lightning_module
        assert module is not None
        self.setup_optimizers(trainer)
        admission.check_optimizers(self.optimizers)
        group_names = [checkpoint.parameter_group_names(module, o) for o in self.optimizers]
        separability = None
        wanted = sharding.wants_shards(self._options.sharding_options, self.data_parallel_size)
        if self.optimizers and (wanted or sharding.may_couple(self.optimizers[0], self._plan)):
            separability = sharding.test_optimizer(
                self.optimizers[0], self.root_device, self._job.connection.all_gather
            )
            sharding.refuse_coupling(separability, self._plan)
        if self._pipeline.structure is not None:
            self._summarise_whole_module(trainer)
        self._pipeline.install()
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self._parameter_groups = self._changes.enter_context(
            ParameterGroups(self._pipeline, self.optimizers, group_names, callbacks, self._job.connection.all_gather)
        )
        self.setup_precision_plugin()
        optimizers_to_device(self.optimizers, self.root_device)
        self._gradients = make_gradients(
            self._pipeline,
            self._groups,
            self._plan,
            self.root_device,
            scaler=getattr(self.precision_plugin, "scaler", None),
            shard=lambda reducer: self._shard_optimizer(trainer, separability, reducer),
            options=self._options.gradient_options,
            board=self._make_board(),
            flat=self._options.sharding_options.master_weights,
        )
        self._shards = self._gradients.host.shards
        self._changes.callback(self._gradients.close)
        self._changes.enter_context(clipping(self.precision_plugin, self._gradients.host))

    def _follow_trainer(self, trainer: "pl.Trainer") -> None:
        """What keeps metrics, signals, the module's own state and random numbers alike while the run lasts."""
        assert self._pipeline is not None and self._groups is not None and self.lightning_module is not None
        assert self._job is not None
        module = self.lightning_module
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self._state = ModuleState(self._pipeline, self._groups.p2p, self.root_device)
        self._state_each_batch = admission.hooks_that_read_state(module, trainer)
        if self.world_size > 1:
            signals = BatchSignals(trainer, self._job.connection.watch, self._explaining, self._noting_wait)
            self._signals = self._changes.enter_context(signals)
            self._changes.enter_context(ReplicaMetrics(module, self._groups.data_parallel))
        monitored = any(isinstance(c, TimelineMonitor) for c in callbacks)
        monitors = [] if self._monitor is None or monitored else [self._monitor]
        self._changes.enter_context(extra_callbacks(trainer, first=[ModuleStateSync()], last=monitors))
        agreement.share_random_state(self._groups)
        self._state.watch()

    def _shard_optimizer(
        self, trainer: "pl.Trainer", found: Separability | None, reducer: GradientReducer
    ) -> ShardedOptimizer | None:
        """Shard the optimizer over the replicas, if that is asked for or better."""
        if found is None:
            return None
        assert self._pipeline is not None and self._parameter_groups is not None
        assert self._job is not None
        optimizer = self.optimizers[0]
        local = self._pipeline.local_parameters
        shards, choice = sharding.shard_optimizer(
            self._options.sharding_options,
            found,
            optimizer,
            [[n for n in names if n in local] for names in self._parameter_groups.names_of(optimizer)],
            reducer,
            trainer,
            data_parallel_size=self.data_parallel_size,
            device=self.root_device,
            gather=self._job.connection.all_gather,
        )
        if self.is_global_zero:
            print(choice.describe(), flush=True)
        return shards

    def _make_board(self) -> SyncBoard | None:
        """Where groups of replicas tell rank 0 how they sum their gradients."""
        if self.data_parallel_size == 1 or self._placement is None:
            return None
        store = default_store()
        run = store.add(f"holmes_gradient_sync_runs/{self.global_rank}", 1)  # the same number on all ranks
        return SyncBoard(store, run=run, groups=[str(s) for s in range(self._placement.pipeline_parallel_size)])

    @property
    def gradient_sync_choices(self) -> list[SyncChoice]:
        """On rank 0: how each group of replicas sums its gradients, as far as it has been told, later choices after."""
        return [] if self._gradients is None else list(self._gradients.reducer.choices)

    def _show_whole_module_to_callbacks(self, trainer: "pl.Trainer") -> None:
        """Let averages of weights and norms of gradients cover all stages."""
        assert self._pipeline is not None and self._groups is not None and self._groups.pipeline is not None
        averages = WeightAverages(trainer, self._pipeline, self._groups.p2p)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        norms = GradNormExchange([self.lightning_module, *callbacks], self._pipeline, self._groups.pipeline)
        self._changes.enter_context(averages)
        self._changes.enter_context(norms)

    def _summarise_whole_module(self, trainer: "pl.Trainer") -> None:
        """Make summaries with an ``example_input_array`` now: they run the module, which lacks layers later."""
        module = self.lightning_module
        assert module is not None
        if module.example_input_array is None:
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ModelSummary) and prints_summary(callback):
                summary = getattr(callback, SUMMARY)(trainer, module)
                self._changes.replace(callback, **{SUMMARY: lambda *_, made=summary: made})

    def global_grad_norm(self, parameters: Any) -> Tensor:
        """The 2-norm over all stages of the gradients of ``parameters`` (this rank's), whole or sharded; all ranks must
        call."""
        assert self._gradients is not None
        return self._gradients.host.norm(parameters)

    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        reset_optimizers(self)
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            if "multiple optimizers" not in str(error):
                raise
            # Lightning's own advice, manual optimization, is no way out here
            raise UnsupportedModuleError(
                f"{type(self.lightning_module).__name__}.configure_optimizers returned several optimizers; return one, "
                f"with a parameter group for each"
            ) from None

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def process_dataloader(self, dataloader: object) -> object:
        """Seed workers by the data-parallel coordinate: by rank, the stages of one replica would augment differently."""
        seeded = bool(int(os.environ.get("PL_SEED_WORKERS", 0)))
        if seeded and isinstance(dataloader, DataLoader) and dataloader.worker_init_fn is None:
            dataloader.worker_init_fn = functools.partial(pl_worker_init_function, rank=self.data_parallel_rank)
            self._changes.callback(_leave_workers, weakref.ref(dataloader))
        return dataloader

    # end

    def on_exception(self, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException) and self._signals is not None and self._signals.ends_together:
            return  # no rank has failed, and callbacks may save
        if self._gradients is not None:
            self._gradients.host.abandon()
        self._saved_weights = None
        if self._connection is not None:
            self._connection.report(exception, self._explaining)

    def teardown(self) -> None:
        """Give every rank the whole trained module again, unless the run has failed; take back what was changed.

        Lightning calls it after a run and after an exception, also where that came from :meth:`setup` or before.
        """
        with self._changes:
            self._end_pipeline()
        self._signals = self._gradients = None
        self._last_step = self._driver = self._state = self._builder = self._trial = self._clock = None
        publish_coordinate(None)
        if self.lightning_module is not None and dtensor.has_dtensor_parameters(self.lightning_module):
            gc.collect()  # Lightning moves the module to the host, and torch moves no DTensor that a dead graph holds
        super().teardown()
        self._checkpoints.finish(failed=self._failed, alone=self.world_size == 1)
        if self._connection is not None:
            self._connection.close()  # at last: where a link has just been cut it waits, and a checkpoint should not

    def _end_pipeline(self) -> None:
        if self._pipeline is not None:
            self._pipeline.uninstall()
            if self._builder is not None and self._builder.leave(self._pipeline):
                pass  # larger than a process, perhaps: each keeps its part
            elif self._signals is not None and self._signals.ends_together:
                pass  # what is left of the time goes to the checkpoint
            elif not self._failed and self._groups is not None and self._plan is not None:
                ranks = self._plan.placement.pipeline_group(
                    self._groups.data_parallel_rank, self._groups.tensor_parallel_rank
                )
                owners = {s: ranks[self._plan.rank_of(s)] for s in range(self._plan.num_stages)}
                with self._explaining():
                    checkpoint.fill_whole_module(self._pipeline, owners, self._groups.pipeline, self.global_rank)
            if self._gradients is not None:
                self._ended = self._pipeline
            self._pipeline = None


def _leave_workers(loader: "weakref.ref[DataLoader[Any]]") -> None:
    """Take our seeding of workers from a loader of the user's, where there still is one."""
    dataloader = loader()
    if dataloader is not None:
        dataloader.worker_init_fn = None
