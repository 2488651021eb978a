"""HolmesStrategy: implements Lightning's strategy hooks by delegating to Run, Fit and RunCheckpoints. It contains no algorithms.

import lightning_holmes
Trainer(strategy="holmes", devices=4)
Trainer(strategy=HolmesStrategy(topology="topology.yaml", num_microbatches=8), devices=4)

The strategy is the only owner of the Options, of the Job and its Connection (from the first run on), and of the last Run and the last Fit,
whose plan, optimizer names and shards stay readable after they have ended.
"""

import gc
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_holmes.checkpoint import CheckpointManager, Membership
from lightning_holmes.cluster.topology import Topology
from lightning_holmes.comm import dtensor
from lightning_holmes.comm.coordinate import publish_coordinate
from lightning_holmes.comm.interrupt import ends_by_interrupt
from lightning_holmes.comm.label import labelled
from lightning_holmes.errors import ConfigurationError, HolmesError
from lightning_holmes.lightning_package import fabric, introduce, pl, refuse_other_trainer
from lightning_holmes.lightning_private import BEFORE_FIT, reset_optimizers, set_device_mesh
from lightning_holmes.pipeline.batch import BatchSplitter
from lightning_holmes.plan.asked import Asked, AskedSharding
from lightning_holmes.plan.plan import Plan
from lightning_holmes.plan.prediction import Prediction
from lightning_holmes.plan.schedule import ScheduleName
from lightning_holmes.replacements import Replacements
from lightning_holmes.strategy import admission, agreement
from lightning_holmes.strategy.building import ModuleBuilder
from lightning_holmes.strategy.checkpointing import RunCheckpoints, save_folder_alone
from lightning_holmes.strategy.compat.resumable_sampler import make_resumable
from lightning_holmes.strategy.compat.workers import seeded_workers
from lightning_holmes.strategy.connection import Connection
from lightning_holmes.strategy.fit import Fit
from lightning_holmes.strategy.job import Job
from lightning_holmes.strategy.launcher import HolmesLauncher
from lightning_holmes.strategy.lightning_collectives import ReplicaCollectives
from lightning_holmes.strategy.loaded_state import LoadedState
from lightning_holmes.strategy.options import Options
from lightning_holmes.strategy.removed_arguments import refuses_removed
from lightning_holmes.strategy.run import Evaluation, Run
from lightning_holmes.strategy.run_context import ModuleShards, RunContext
from lightning_holmes.strategy.snapshots import Snapshots, begin_snapshots


class HolmesStrategy(ReplicaCollectives):
    """Trains an ordinary LightningModule as a pipeline across clusters, with data-parallel replicas inside them.

    Args:
        topology: which devices form which cluster: the path of a YAML file (see ``lightning_holmes.cluster.topology``), a
            ``Topology``, or "auto": discovered at the start; all devices of one host are one cluster.
        pipeline_parallel_size: ranks of one pipeline; "auto": one stage for each cluster, or more if their sizes differ.
        tensor_parallel_size: ranks of a host over which each layer is sharded. The module shards its layers in
            ``configure_model``, with torch's ``parallelize_module`` over ``self.device_mesh["tensor_parallel"]``.
        num_microbatches: the number of microbatches into which each training batch of a replica is split; "auto" is the number with the
            fastest predicted step, and 1 without a pipeline.
        eval_num_microbatches: the number of microbatches for validation, test and prediction. "auto" is 1: a whole batch at once,
            exact for any step.
        schedule: "1f1b", "eager_1f1b", "gpipe", "interleaved_1f1b", "eager_interleaved_1f1b", "zero_bubble" (each backward is split into input
            gradients and weight gradients, and the latter fill the bubble), "eager_zero_bubble", "zero_bubble_v" (the same, with two stages a
            rank, down the ranks and back up), "breadth_first" (all microbatches pass a stage before the next stage starts; with one
            pipeline rank this is layered gradient accumulation), or "auto": interleaved if ``num_chunks`` is above 1; else the schedule with the
            fastest predicted step, where "breadth_first" is a candidate and "gpipe" is not.
        num_chunks: stages of each rank; "auto" is 1 unless a schedule with several stages a rank is chosen. With "breadth_first", "auto" is one
            layer a stage on one pipeline rank, and otherwise the number that is predicted to be the fastest.
        partition: "self_adapting": layers are assigned so that the slowest stage is as fast as possible, from the costs of the
            layers and of the code before and after them and the speeds of the hosts, and then moved where that makes the
            simulated step faster; "uniform": by count; or a list, the number of layers of each stage.
        plan: a plan file of another run (its plan.yaml), or a checkpoint of that run. It decides the sizes, the schedule, the chunks,
            microbatches and layers of each stage, what is sharded, and how gradients are summed; it is refused if it was made for other
            clusters or another module.
        layers: the name of the module's layer list, an nn.ModuleList or nn.Sequential; "auto" finds it.
        broadcast_batch: the first stage of a replica loads its batches and sends them to the other stages,
            for data that does not load identically on several ranks.
        save_distributed_checkpoint: True: write each checkpoint as a folder, to which every rank writes its part; False: as one file that
            plain Lightning reads. "auto" is True for more than one process. Both formats can be loaded in any layout.
        async_checkpoint: copy the state, and write it while training continues.
        snapshot_every_n_steps: keep each rank's state in the memory of its host and of another host, after the first step and then every so
            many steps; "auto": so often that they take a hundredth of the time. A restarted job continues from the newest snapshot that the
            remaining hosts hold together (see docs/faults.md). None: no snapshots.
        gradient_sync: how gradients are summed over replicas: "all_reduce", "reduce_scatter", "p2p" or "hierarchical";
            "auto" chooses for each group by the links between its ranks (see docs/how-it-works.md). Not with optimizer nodes, which sum.
        compression: "bf16": activations and gradients that cross between clusters are rounded to bf16; not exact. None: nothing is rounded.
        sharding: what is sharded over the replicas: "none", "optimizer" (each replica keeps its shard of the optimizer's state, and updates
            its shard of the parameters) or "parameters" (each replica keeps its shard of parameters, gradients and optimizer states; a stage is
            whole while it is computed, and the schedule is "breadth_first"). "auto": the optimizer if its whole state does not fit or a step is
            predicted to be faster so, and the parameters if nothing else fits and no hook reads them (see docs/larger-than-memory.md).
        optimizer_nodes: the number of processes without a device that hold parameters and optimizer states, and update them; workers push
            gradients, and pull a stage's parameters before they compute it (see docs/optimizer-nodes.md). The schedule is then
            "breadth_first".
        optimizer_states: where optimizer nodes keep parameters and states: "memory", or a folder on the nodes' hosts.
        master_weights: with precision="bf16-true", let the optimizer step fp32 weights, from which parameters are rounded.
        monitor: record when each rank computes, waits and communicates in the third step; a Chrome trace and a picture of it are written
            into the run's folder (see ``lightning_holmes.callbacks.timeline_monitor``). A number: also every so many steps.
        timeout: how long ranks wait for each other in collectives and transfers.

    Raises:
        ConfigurationError: an argument is impossible by itself; raised later if one does not fit the run.
    """

    strategy_name = "holmes"
    _makes_optimizers = False  # whether configure_optimizers is running

    @refuses_removed
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
        partition: Literal["self_adapting", "uniform"] | list[int] = "self_adapting",
        plan: str | None = None,
        layers: str = "auto",
        broadcast_batch: bool = False,
        save_distributed_checkpoint: bool | Literal["auto"] = "auto",
        async_checkpoint: bool = False,
        snapshot_every_n_steps: int | Literal["auto"] | None = None,
        gradient_sync: str = "auto",
        compression: Literal["bf16"] | None = None,
        sharding: AskedSharding = "auto",
        optimizer_nodes: int = 0,
        optimizer_states: str = "memory",
        master_weights: bool = False,
        monitor: bool | int = False,
        timeout: timedelta | None = timedelta(minutes=30),
    ) -> None:
        given = dict(locals())
        super().__init__()
        introduce(HolmesStrategy)  # to a package of Lightning that has been imported since this one
        self._options = Options(**{entry.name: given[entry.name] for entry in fields(Options)})
        self.num_nodes = 1
        """The number of hosts of the job; set by the Trainer from its ``num_nodes`` argument."""
        self._begin_without_runs()

    def _begin_without_runs(self) -> None:
        """Create the attributes that belong to runs, which no copy of the strategy has."""
        arguments = set(vars(self))
        self._connection: Connection | None = None
        self._job: Job | None = None
        self._builder: ModuleBuilder | None = None  # from configure_model to the end of its run
        self._run: Run | None = None
        self._fit: Fit | None = None
        self._snapshots: Snapshots | None = None  # of the present fit
        self._undo = Replacements()  # of what a run changes, while it lasts
        self._splitter = BatchSplitter()
        self._loaded_state = LoadedState()
        self._module_shards = ModuleShards()
        self._manager = CheckpointManager(
            distributed=self._options.save_distributed_checkpoint, background=self._options.async_checkpoint
        )
        self._of_runs = vars(self).keys() - arguments

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the state of runs: a copy or pickle of a trainer keeps the arguments and Lightning's state, and joins its job anew."""
        state: dict[str, Any] = super().__getstate__()
        return {name: value for name, value in state.items() if name not in self._of_runs} | {"_launcher": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin_without_runs()
        if self.cluster_environment is not None:
            self._configure_launcher()

    # properties

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning shall inject distributed samplers and reduce logged values: True if there are several replicas.

        A single pipeline reads its data and logs as one process does.
        """
        return self.data_parallel_size > 1

    @property
    def global_rank(self) -> int:
        """This process's global rank; inside a stage's part of a step, the data-parallel rank, as in DDP: a step that logs on rank 0
        only would otherwise leave that to a stage whose part of the step does not reach the call."""
        run = vars(self).get("_run")
        return self.data_parallel_rank if run is not None and run.is_inside_part else super().global_rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its host; inside a stage's part of a step, that of its replica among those of the host, as in DDP."""
        own, run = super().local_rank, vars(self).get("_run")
        if run is None or not run.is_inside_part:
            return own
        first, coordinate = super().global_rank - own, run.job.placement.coordinate
        here = {coordinate(rank)[1] for rank in range(first, first + self.num_processes)}
        return sorted(here).index(self.data_parallel_rank)

    @property
    def world_size(self) -> int:
        """The number of processes; in a step and in ``configure_optimizers`` the number of replicas, as in DDP: learning rates and shares of
        data scale with it."""
        run = vars(self).get("_run")
        in_users_code = self._makes_optimizers or (run is not None and run.is_inside_step)
        return self.data_parallel_size if in_users_code else super().world_size

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[super().local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this host."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str | None:
        """The backend of the process groups for tensors; None until it is chosen."""
        return None if self._connection is None else self._connection.backend

    @property
    def data_parallel_rank(self) -> int:
        """This rank's data-parallel coordinate, which decides which samples it loads."""
        return 0 if self._job is None else self._job.groups.data_parallel_rank

    @property
    def data_parallel_size(self) -> int:
        """The number of replicas."""
        return 1 if self._job is None else self._job.placement.data_parallel_size

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    @property
    def device_mesh(self) -> DeviceMesh:
        """The DeviceMesh with the axes ``pipeline``, ``data_parallel`` and ``tensor_parallel``; a LightningModule reads it as
        ``self.device_mesh``.

        Available from ``configure_model`` on, if there is more than one process.
        """
        mesh = self._joined.device_mesh
        if mesh is None:
            raise HolmesError("strategy.device_mesh: one process has no mesh; read it where trainer.world_size > 1")
        return mesh

    @property
    def asked(self) -> Asked:
        """What the arguments, or a plan file, ask of a plan."""
        return self._options.asked

    @property
    def given_plan(self) -> Plan | None:
        """The plan of the file or checkpoint that ``plan`` names."""
        return self._options.given_plan

    @property
    def _joined(self) -> Job:
        if self._job is None:
            raise HolmesError("this process has not joined its job yet: ask in setup() or a later hook of a run")
        return self._job

    @property
    def _latest_run(self) -> Run:
        if self._run is None:
            raise HolmesError("no run has begun; call trainer.fit, validate, test or predict, which call the steps")
        return self._run

    @property
    def _training(self) -> Fit:
        if self._fit is None:
            raise HolmesError("nothing is trained before the trainer has set the strategy up in fit")
        return self._fit

    @property
    def plan(self) -> Plan:
        """The plan: which layers run on which rank, and in which schedule; known from the first training batch on, or the first batch of an
        evaluation."""
        if self._run is None or self._run.planned is None:
            raise HolmesError("strategy.plan: the plan is made when the first batch comes; read it in a later hook")
        return self._run.plan

    @property
    def prediction(self) -> Prediction | None:
        """The predicted cost of a training step, made together with the plan; None if no costs were known."""
        return None if self._run is None or self._run.planned is None else self._run.planned.prediction

    # processes

    def _configure_launcher(self) -> None:
        refuse_other_trainer(self.accelerator)
        assert self.cluster_environment is not None
        self._launcher = HolmesLauncher(
            self.cluster_environment,
            self.num_processes,
            self.num_nodes,
            self._agree_on_checkpoint,
            None if self._options.snapshot_every_n_steps is None else self._find_snapshot,
        )

    def set_world_ranks(self) -> None:
        """Tell the cluster environment this process's rank, as Lightning's strategies do."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        pl.utilities.rank_zero_only.rank = utils_rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        # no reset_seed() as in DDP: random numbers continue as in plain Lightning, and share_random_state aligns stages
        # Collect what an earlier run has left: a forked data worker that collected its groups would wait for threads that the fork lacks.
        gc.collect()
        self.set_world_ranks()
        self._compare_with_launcher()
        super().setup_environment()
        if self._connection is None:
            assert self.cluster_environment is not None
            self._connection = Connection(
                self.cluster_environment, self.root_device, num_nodes=self.num_nodes, options=self._options
            )
        with ends_by_interrupt() if self.world_size > 1 else nullcontext():
            self._connection.open()
            if self._job is None:
                with self._connection.explaining():
                    self._job = Job(self._connection, self._options)
        if self.lightning_module is not None:
            set_device_mesh(self.lightning_module, self._job.device_mesh)
        publish_coordinate((self.data_parallel_rank, self.data_parallel_size))

    def _compare_with_launcher(self) -> None:
        """Refuse a trainer whose number of processes differs from the number that the launcher started; Lightning checks this for some
        launchers only. With snapshots, torchrun's number of hosts is used instead, since it may change at a restart."""
        assert self.cluster_environment is not None
        started, asked = self.cluster_environment.world_size(), self.num_nodes * self.num_processes
        elastic = self._options.snapshot_every_n_steps and isinstance(
            self.cluster_environment, fabric.plugins.environments.torchelastic.TorchElasticEnvironment
        )
        if elastic and started % self.num_processes == 0:  # torchrun --nnodes=MIN:MAX
            self.num_nodes, asked = started // self.num_processes, started
        if started != asked:
            raise ConfigurationError(
                f"{type(self.cluster_environment).__name__} says that {started} processes were started, but Trainer(num_nodes="
                f"{self.num_nodes}, devices={self.num_processes}) counts {asked}: set num_nodes and devices to what was started, or start {asked}"
            )

    def _agree_on_checkpoint(self, find: Callable[[], Any]) -> Any:
        self.setup_environment()
        job = self._joined
        with job.explaining():
            return job.connection.ask_rank_0(find, relays=Exception)

    def _find_snapshot(self, trainer: "pl.Trainer", find_checkpoint: Callable[[Any], Any], ckpt_path: Any) -> Any:
        """Begin a fit's snapshots, and return the path that the fit begins from: a snapshot of this job, or a checkpoint."""
        every = self._options.snapshot_every_n_steps
        assert self.cluster_environment is not None and every is not None
        self.setup_environment()
        with self._joined.explaining():
            self._snapshots = begin_snapshots(
                trainer,
                self._joined.membership,
                self._joined.topology,
                every=every,
                device=self.root_device,
                environment=self.cluster_environment,
            )
            return self._snapshots.choose(find_checkpoint, ckpt_path)

    def _explaining(self) -> AbstractContextManager[None]:
        if self._job is not None:
            return self._job.explaining()
        return nullcontext() if self._connection is None else self._connection.explaining()

    # a run

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Run ``configure_model`` without allocating its tensors: a rank later materializes those that it holds.

        If ``configure_model`` cannot run so (for example, because it reads weights by its own code), it runs again with real tensors.
        """
        assert self.lightning_module is not None
        if self.world_size > 1:
            agreement.share_generators()
        self._builder = self._make_builder()
        with self._builder.configuring(self.lightning_module, self.precision_plugin.module_init_context):
            yield

    def _make_builder(self) -> ModuleBuilder:
        return ModuleBuilder(lambda: self.broadcast(agreement.choose_seed()), self.root_device)

    def setup(self, trainer: "pl.Trainer") -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._builder = self._builder or self._make_builder()
        options = self._options
        if self._snapshots is not None and self._snapshots.num_microbatches is not None:
            options = replace(options, num_microbatches=self._snapshots.num_microbatches)
        context = RunContext(
            job=self._joined,
            options=options,
            builder=self._builder,
            loaded_state=self._loaded_state,
            splitter=self._splitter,
            former=None if self._run is None else self._run.planned or self._run.context.former,
            module_shards=self._module_shards,
            undo=self._undo,
            snapshots=self._snapshots if trainer.state.fn == pl.trainer.states.TrainerFn.FITTING else None,
        )
        with self._explaining():
            if trainer.state.fn == pl.trainer.states.TrainerFn.FITTING:
                self._run = self._fit = Fit(trainer, context)
            else:
                self._run = Evaluation(trainer, context)

    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        reset_optimizers(self)
        self._makes_optimizers = True
        try:
            with admission.refusing_several_optimizers(trainer.lightning_module):
                super().setup_optimizers(trainer)
        finally:
            self._makes_optimizers = False

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def process_dataloader(self, dataloader: object) -> object:
        """Seed workers by the data-parallel rank: seeded by global rank, the stages of one replica would augment differently. Also make the
        sample order of a stateful loader resumable."""
        if isinstance(dataloader, DataLoader):
            self._undo.enter_context(seeded_workers(dataloader, self.data_parallel_rank))
            make_resumable(dataloader, self._undo)
        if self._snapshots is not None:
            self._snapshots.note_loader(dataloader)
        return dataloader

    def on_exception(self, exception: BaseException) -> None:
        if (
            isinstance(exception, pl.utilities.exceptions.SIGTERMException | KeyboardInterrupt)
            and self._run is not None
            and self._run.ends_together
        ):
            return  # no rank has failed, and callbacks may save
        if self._fit is not None:
            self._fit.abandon()
        self._loaded_state.weights, self._loaded_state.optimizers = None, []
        if self._connection is not None:
            self._connection.report(exception, self._explaining)
        if self._snapshots is not None:
            self._snapshots.fail(exception)

    def teardown(self) -> None:
        """Give every rank the whole trained module again, unless the run has failed; undo the run's changes to other objects.

        Lightning calls it after a run and after an exception, even one from :meth:`setup` or before.
        """
        publish_coordinate(None)
        with self._explaining():
            self._undo.close()
        self._builder = None
        if self.lightning_module is not None and dtensor.has_dtensor_parameters(self.lightning_module):
            gc.collect()  # Lightning moves the module to the host, and torch moves no DTensor that a dead graph holds
        failure = sys.exception()
        try:
            super().teardown()
        except RuntimeError:
            if failure is None:
                raise
            # the failure's own traceback holds the graph, and so the parameters; it is what the user is to see
            assert self.accelerator is not None
            for part in (self.precision_plugin, self.accelerator, self.checkpoint_io):
                part.teardown()
        connection = self._connection
        if connection is None:
            self._manager.finish(Membership())
            return
        with self._explaining():
            member = Membership() if self._job is None else self._job.membership
            self._manager.finish(member, failed=connection.failed)
            self._end_snapshots(connection.failed)
        connection.close()  # last: it waits if a link has just been cut, and a checkpoint should not wait for that

    def _end_snapshots(self, failed: bool) -> None:
        snapshots, self._snapshots = self._snapshots, None
        if snapshots is not None:
            assert self.lightning_module is not None
            status = self.lightning_module.trainer.state.status
            snapshots.close(well=not failed and status != pl.trainer.states.TrainerStatus.INTERRUPTED)

    # steps

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Called after the hooks of the module and the callbacks; at the first batch, make the plan."""
        self._training.begin_batch(batch, batch_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the whole batch, forward and backward, through the pipeline; gradients stay with the strategy."""
        with self._training.lifted():
            return self._training.training_step(*args, *kwargs.values())

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._latest_run.evaluation_step("validation_step", *args, *kwargs.values())

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._latest_run.evaluation_step("test_step", *args, *kwargs.values())

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._latest_run.evaluation_step("predict_step", *args, *kwargs.values())

    def synchronise_module_state(self) -> None:
        """Bring the state that steps have left on the module, and metrics, to every rank of the pipeline; all ranks must call."""
        if self._run is not None and self._run.is_open:
            with self._lifted():
                self._run.synchronise_module_state()

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Keep gradients on their rank while they accumulate over batches."""
        self._training.accumulates = True
        try:
            yield
        finally:
            self._training.accumulates = False

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Hand the gradients that the pipeline has accumulated to the optimizer, reduced unless more batches are to come."""
        assert self.lightning_module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        with self._training.lifted():
            self._training.unchanged.check()
            self._training.hand_over()
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        self._training.absorb()
        return closure_loss

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step as Lightning does; on return, the module has the state that other ranks' steps left on it."""
        with self._training.lifted():
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
            self._training.receive_module_state()  # schedulers may read it
            return output

    def global_grad_norm(self, parameters: Any) -> Tensor:
        """Return the 2-norm, over all stages, of the gradients of ``parameters`` (this rank's), whole or sharded; all ranks must
        call."""
        parameters = list(parameters)
        with self._lifted(), labelled(lambda: "holmes: norm of gradients"):
            return self._training.gradients.host.norm(parameters)

    def barrier(self, name: str | None = None) -> None:
        if self._snapshots is not None and name == BEFORE_FIT:
            self._snapshots.is_active = True
        super().barrier(name)

    # checkpoints

    @property
    def _checkpoints(self) -> RunCheckpoints | None:
        """The checkpoint hooks of this moment. None before the job is joined: then Lightning's own methods are used, except for writing a
        folder, if one is asked for."""
        if self._job is None or self.lightning_module is None:
            return None
        snapshots = self._snapshots
        return RunCheckpoints(
            manager=self._manager if snapshots is None or not snapshots.is_taking else snapshots.manager,
            job=self._job,
            run=self._run,
            fit=self._fit,
            loaded_state=self._loaded_state,
            module=self.lightning_module,
            io=self.checkpoint_io,
        )

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state: for a checkpoint folder, the part that this rank writes; for one file, all of it on rank 0, and all ranks
        must call."""
        ours = self._checkpoints
        with self._lifted():
            self.synchronise_module_state()  # for on_save_checkpoint
            return super().lightning_module_state_dict() if ours is None else ours.module_state()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state: for a checkpoint folder, the part that this rank writes, by parameter names; for one file, all of it on
        rank 0, numbered as plain Lightning does: then all ranks must call."""
        ours = self._checkpoints
        with self._lifted():
            return super().optimizer_state(optimizer) if ours is None else ours.optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save the checkpoint that Lightning has collected; all ranks must call. With ``async_checkpoint``, return once it is copied."""
        ours = self._checkpoints
        if ours is not None:
            with self._lifted():
                if self._snapshots is not None:
                    self._snapshots.describe(checkpoint)
                ours.save(checkpoint, filepath, storage_options)
                if self._snapshots is not None:
                    self._snapshots.note_saved(checkpoint, filepath)
        elif self._options.save_distributed_checkpoint is not True:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif self.is_global_zero:
            assert self.lightning_module is not None
            save_folder_alone(checkpoint, filepath, self.lightning_module)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint; all ranks must call."""
        ours = self._checkpoints
        remove = super().remove_checkpoint if ours is None else ours.remove
        remove(filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint of either format and any layout; all ranks must call."""
        ours, snapshots = self._checkpoints, self._snapshots
        if ours is None:
            return super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        if snapshots is None or checkpoint_path != snapshots.chosen:
            loaded = ours.load(checkpoint_path, weights_only=weights_only)
            if snapshots is not None and checkpoint_path == snapshots.own_checkpoint:
                snapshots.keep_whole_batch(loaded)
            return loaded
        loaded = ours.load_folder(checkpoint_path, weights_only=weights_only)
        snapshots.resume(loaded)
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights: now if the layout is known, else as soon as it is, so that a rank reads only its part."""
        ours = self._checkpoints
        load = super().load_model_state_dict if ours is None else ours.load_module
        load(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        ours = self._checkpoints
        if ours is not None:
            ours.load_optimizers(checkpoint, self._training)
