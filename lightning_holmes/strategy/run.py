"""Run: a fit or an evaluation on this rank, from Strategy.setup to teardown: its plan, its pipeline and the steps of its batches.

    run = Evaluation(trainer, context)           # every rank must make it; Fit (fit.py) if the module trains
    output = run.evaluation_step("validation_step", batch, batch_idx)
    context.undo.close()                         # the module is whole again, and the run's changes are undone

The plan and the pipeline of an ended run stay readable: the next run and a checkpoint that is saved later read them.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch

from lightning_holmes import checkpoint
from lightning_holmes.callbacks.timeline_monitor import TimelineMonitor, make_monitor
from lightning_holmes.comm import dtensor
from lightning_holmes.comm.absent import forget, refusing_in_threads
from lightning_holmes.comm.parameter_exchange import ParameterExchange
from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.lightning_package import pl
from lightning_holmes.lightning_private import divides_data
from lightning_holmes.optim.elementwise import Separability
from lightning_holmes.optim.remote import RemoteReducer
from lightning_holmes.optim.stage_shards import StageShards
from lightning_holmes.pipeline.module_state import ModuleState
from lightning_holmes.pipeline.noticed_functions import NoticedFunctions
from lightning_holmes.pipeline.own_generators import preserved_generators
from lightning_holmes.pipeline.replay import replay
from lightning_holmes.pipeline.request import StepRequest
from lightning_holmes.pipeline.seeds import derive_seed, preserved_random_state
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.pipeline.steps import StepDriver
from lightning_holmes.pipeline.structure import ModuleStructure
from lightning_holmes.plan.plan import Plan
from lightning_holmes.plan.schedule import Action
from lightning_holmes.replacements import Replacements
from lightning_holmes.strategy import admission, agreement
from lightning_holmes.strategy.batch_source import BatchSource
from lightning_holmes.strategy.building import move_parameters
from lightning_holmes.strategy.compat.averaging import swapping_whole
from lightning_holmes.strategy.compat.extra_callbacks import ModuleStateSync, extra_callbacks
from lightning_holmes.strategy.compat.finetuning import ParameterGroups
from lightning_holmes.strategy.compat.lockstep import Lockstep
from lightning_holmes.strategy.compat.metrics import replica_metrics
from lightning_holmes.strategy.compat.prediction_writers import writing_once
from lightning_holmes.strategy.compat.signals import BatchSignals
from lightning_holmes.strategy.gradients import TrainedPart, make_stage_shards
from lightning_holmes.strategy.planning import plan_run, show_plan
from lightning_holmes.strategy.run_context import RunContext, step_context
from lightning_holmes.strategy.samples import StepLoops, StepSample
from lightning_holmes.strategy.sharding import may_shard_parameters
from lightning_holmes.strategy.tracing import TraceResult, learn_steps
from lightning_holmes.strategy.tripwires import Absent, Tripwires
from lightning_holmes.strategy.user_hooks import steps_whose_state_is_read

_T = TypeVar("_T")
_EVALUATION = {"validation_step": 1, "test_step": 2, "predict_step": 3}


class Run:
    """Base class of fits and evaluations. All ranks make one, and call its methods together.

    A run begins with the whole module on every rank. Steps are traced on the batches that Lightning passes, so that all hooks
    before a step have been called: an evaluation step is traced when it first runs, and runs on the whole module if there is no plan
    yet. The first training batch of a fit, or the first batch of an evaluation, makes the plan, and each rank keeps its part.
    A module that was built without memory is never whole: its parameters have no values before a plan is made, and a sanity
    check makes a plan of its own, which the first training batch replaces.

    Attributes:
        known: what tracing has found out about the module's steps.
        planned: the plan; None before it is made, while ``plan`` may not be read.
        pipeline: this rank's part of the module.
        stage_shards: this rank's shards of the parameters, also those that optimizer nodes hold; None if the parameters are whole.
        base_seed: the seed of all random numbers in steps; the same on all ranks.
        is_open: whether the run has begun and not ended.
    """

    def __init__(self, trainer: "pl.Trainer", context: RunContext) -> None:
        self.trainer, self.job, self.options = trainer, context.job, context.options
        self._found: Separability | None = None  # how the optimizer of a fit can be sharded, once it is tested
        self.module = trainer.lightning_module
        self.exchange: ParameterExchange | None = None
        self.stage_shards: StageShards | None = None
        self.is_open = False
        self.known = TraceResult()
        self.planned: Plan | None = None
        self.context = context
        self._hooks_have_run = True
        self._signals: BatchSignals | None = None
        self._lockstep: Lockstep | None = None
        self._tripwires: Tripwires | None = None
        self.base_seed = self._align_ranks()
        self.may_shard = may_shard_parameters(self.options, self.module, self.job.placement, self.job.connection)
        groups, device = self.job.groups, self.job.connection.device
        self.pipeline = PipelineModule.whole(self.module, device, rank=groups.pipeline_rank)
        self._loops = StepLoops(trainer)
        self._source = BatchSource(groups.p2p, always=self.options.broadcast_batch, divides=divides_data(trainer))
        self._state = ModuleState(self.pipeline, groups.p2p, device)
        self._whole_driver = self._make_driver(PipelineModule.whole(self.module, device), "gpipe", 1)
        self.driver = self._whole_driver
        self._asking = NoticedFunctions(torch.distributed, ("get_rank", "get_world_size"))
        self._whole_steps: set[str] = set()  # steps that the stages of the plan cannot run
        context.undo.callback(self._end)
        divides = self.job.placement.pipeline_parallel_size > 1 or self.options.optimizer_nodes > 0
        divides = divides or self.may_shard
        context.builder.begin(self.pipeline, is_pipeline=divides, overwritten=context.loaded_state.weights is not None)
        if not context.builder.waits:
            context.loaded_state.put_weights(self.pipeline)

    @property
    def plan(self) -> Plan:
        """The plan, once it is made."""
        assert self.planned is not None
        return self.planned

    def _make_driver(self, pipeline: PipelineModule, schedule: str, num_chunks: int) -> StepDriver:
        groups = self.job.groups
        return StepDriver(
            pipeline,
            groups.p2p,
            schedule=schedule,
            num_chunks=num_chunks,
            device=self.job.connection.device,
            splitter=self.context.splitter,
            tensor_p2p=groups.tensor_p2p,
            state=self._state,
        )

    # tracing steps and planning

    @contextmanager
    def _learning(self) -> Iterator[None]:
        """Context for set-up work in mid-run: preserves the state of all generators, and leaves inference mode, so that tensors made inside
        can be trained later."""
        with (
            preserved_random_state(self.job.connection.device),
            preserved_generators(self.module),
            torch.inference_mode(False),
        ):
            yield

    def _traced(self, samples: Sequence[StepSample]) -> TraceResult:
        """What is known with what tracing these steps tells. All ranks must call."""
        with self._counting_replicas():
            return learn_steps(self.trainer, self.context, self.known, samples)

    @contextmanager
    def _counting_replicas(self) -> Iterator[None]:
        """Context for steps, in which the ranks that user code asks for count replicas, as in DDP."""
        placement, rank = self.job.placement, self.job.groups.data_parallel_rank
        if placement.world_size == placement.data_parallel_size:
            yield
            return
        answers = {"get_rank": rank, "get_world_size": placement.data_parallel_size}
        with Replacements() as counting, self._asking.noticing(answers.get, of_libraries=False):
            counting.replace(pl.utilities.rank_zero_only, rank=rank)
            yield

    def _learn(self, sample: StepSample) -> None:
        """Trace an evaluation step before it first runs. All ranks must call."""
        if self.known.knows(sample.step_name) or sample.step_name in self._whole_steps:
            return
        if self.planned is not None:
            self._learn_beside_plan(sample)
        elif self.context.builder.waits:
            self._make_plan([sample])
            self._install()
        else:
            with self._learning():
                self.known = self._traced([sample])

    def _learn_beside_plan(self, sample: StepSample) -> None:
        """Trace a step that was not known when the plan was made. If the stages cannot run it, it runs on the whole module."""
        around = self._without_gates if self.context.builder.defers else self.with_whole_module
        with self._learning():
            found = around(lambda: self._traced([sample]))
        problem = self._problem_of(found.structure)
        if problem is not None:
            self._whole_steps.add(sample.step_name)
            if self.job.placement.pipeline_parallel_size > 1:
                pl.utilities.rank_zero_warn(
                    f"{type(self.module).__name__}.{sample.step_name} was not known when the plan was made, and does not suit it "
                    f"({problem}): for each of its batches every rank is given the whole module. A sanity check "
                    f"(num_sanity_val_steps=1) lets the plan be made for it, too"
                )
            return
        self.known = found
        if found.structure is not None and self.pipeline.structure is not None:
            self.pipeline.structure = replace(found.structure, readers=self.pipeline.structure.readers)

    def _problem_of(self, structure: ModuleStructure | None) -> str | None:
        """Return why the present stages cannot run a module with this structure; None if they can."""
        mine, partition = self.pipeline.structure, self.plan.partition
        if mine is None:
            return None
        if structure is None:
            return "it runs through no list of layers"
        try:
            structure.check_partition(partition, one_rank=len(self.pipeline.stages) == partition.num_stages)
            structure.check_chunks(len(self.pipeline.stages))
        except UnsupportedModuleError as error:
            return str(error)
        for stage in range(partition.num_stages):
            lacking = structure.parameters_of(partition, stage) - mine.parameters_of(partition, stage)
            if lacking:
                return f"it reads {min(lacking)} on stage {stage}, where nothing else does"
        return None

    def _make_plan(self, samples: Sequence[StepSample]) -> None:
        """Trace the module on these batches, make the plan, and fill this rank's stages. All ranks must call."""
        self.pipeline.uninstall()
        with self._learning():
            self.known = self._traced(samples)
            training = next((sample for sample in samples if sample.step_name == "training_step"), None)
            plan = plan_run(
                self.trainer,
                self.context,
                self.known,
                training,
                separability=self._found,
                may_shard_parameters=self.may_shard,
            )
        held = None if self.planned is None else self._held()
        connection = self.job.connection
        self.planned = plan
        if training is not None and plan.num_microbatches > 1:
            admission.refuse_accumulation_hooks(self.module)
        if training is not None and max(plan.num_microbatches, plan.placement.world_size) > 1:
            admission.note_gradient_hooks(self.module)
        self.pipeline.divide(self.known.structure, plan.partition, plan.stages_of(self.job.groups.pipeline_rank))
        with torch.inference_mode(False):
            waits = self._waits_for_nodes(training)
            if waits or self._lives_in_shards(plan):
                if not waits:
                    self._fill_shards(held)
                held = None
            elif held is None:
                kept = self.context.builder.fill(
                    self.pipeline, overwritten=self.context.loaded_state.weights is not None
                )
                everyone = [] if kept is None else connection.all_gather(kept)
                held = None if kept is None else [everyone[rank] for rank in self._ranks]
            if held is not None:
                move_parameters(self.pipeline, held, self._held(), self._ranks, self.job.groups.pipeline)
            if not waits:
                self.context.loaded_state.put_weights(self.pipeline)
        if training is not None or self.trainer.state.fn != pl.trainer.states.TrainerFn.FITTING:
            show_plan(plan, self.pipeline, self.job)
        self.driver = self._make_driver(self.pipeline, plan.schedule, plan.num_chunks)

    def _lives_in_shards(self, plan: Plan) -> bool:
        """Whether a module that was built without memory gets its values in shards: because the plan says so, or because its values are already
        in shards."""
        in_shards = self.context.module_shards.of(self.module) is not None
        divides = plan.sharding == "parameters" or self.options.optimizer_nodes > 0
        return self.context.builder.defers and (divides or in_shards)

    def _waits_for_nodes(self, training: StepSample | None) -> bool:
        """Whether the values of a module that was built without memory go to optimizer nodes, to which there is no connection yet."""
        return False

    def _fill_shards(self, held: Sequence[set[str]] | None) -> None:
        """Fill this rank's shards of the parameters, which no rank has whole.

        Args:
            held: the names of the parameters that each rank of the pipeline has by the previous plan, if there is one.
        """
        context, job = self.context, self.job
        module_shards = context.module_shards
        self.stage_shards = shards = make_stage_shards(self.part())
        self.context.undo.callback(shards.queue.close)
        former = module_shards.take(self.module)
        if former is not None:
            context.builder.bring_parts(self.pipeline, overwritten=True)  # the former shards have the values
            everyone = job.connection.all_gather(set(former.parameters))
            held = [everyone[rank] for rank in self._ranks]
        if held is None or context.loaded_state.weights is not None:
            context.fill_shards(shards, self.pipeline)
        elif former is not None and held == self._held():
            shards.lay_out(by_elements=former.by_elements, former=former)
        else:
            if former is not None:
                former.bring_into(self.pipeline.parameters, former.parameters)
                former.queue.close()
            move_parameters(self.pipeline, held, self._held(), self._ranks, job.groups.pipeline)
            shards.lay_out(by_elements=True)
        module_shards.keep(shards, self.module)
        self.exchange = shards

    def part(self) -> TrainedPart:
        """Return this rank's part of the module."""
        return TrainedPart(
            trainer=self.trainer,
            job=self.job,
            options=self.options,
            plan=self.plan,
            pipeline=self.pipeline,
            structure=self.known.structure,
            step=None,
        )

    def _held(self) -> list[set[str]]:
        """Return the names of the parameters that each rank of the pipeline holds by the plan."""
        structure, plan = self.pipeline.structure, self.plan
        if structure is None:
            return [set(self.pipeline.parameters)]
        size = plan.placement.pipeline_parallel_size
        stages = [plan.stages_of(rank) for rank in range(size)]
        return [set().union(*(structure.parameters_of(plan.partition, s) for s in of_rank)) for of_rank in stages]

    @property
    def _ranks(self) -> Sequence[int]:
        """The global ranks of this rank's pipeline, in order."""
        groups = self.job.groups
        return self.plan.placement.pipeline_group(groups.data_parallel_rank, groups.tensor_parallel_rank)

    def _rank_of(self, stage: int) -> int:
        """The global rank of this pipeline that runs a stage; the pipeline's process group may have its ranks in another order."""
        return self._ranks[self.plan.rank_of(stage)]

    def _install(self) -> None:
        """Release the parameters of other stages."""
        with torch.inference_mode(False):
            self.pipeline.install()
            self._state.watch()

    def with_whole_module(self, act: Callable[[], _T]) -> _T:
        """Return ``act()``, called while every rank of the pipeline has the whole module; all ranks must call."""
        shards = self.stage_shards
        if shards is None:
            return self._with_whole_pipeline(act)
        found: list[_T] = []
        inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def run() -> None:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                found.append(self._with_whole_pipeline(act))

        with torch.inference_mode(False):
            shards.put(run)
        return found[0]

    def _with_whole_pipeline(self, act: Callable[[], _T]) -> _T:
        return self._without_gates(act, fills=True)

    def _without_gates(self, act: Callable[[], _T], *, fills: bool = False) -> _T:
        """Return ``act()``, called while the stages' gates are not installed; ``fills``: with the whole pipeline's values."""
        self.pipeline.uninstall()
        if fills:
            with torch.inference_mode(False):
                self._fill_whole_module(keep_local=True)
        try:
            return act()
        finally:
            with torch.inference_mode(False):
                self.pipeline.install()

    def _fill_whole_module(self, *, keep_local: bool) -> None:
        group = self.job.groups.pipeline
        checkpoint.fill_whole_module(self.pipeline, self._rank_of, group, keep_local=keep_local)

    # set-up and end

    def _align_ranks(self) -> int:
        """Check that the module can be run, align module and random state over all ranks, and return the seed that all ranks share."""
        trainer, job, context = self.trainer, self.job, self.context
        fitting, is_pipeline = (
            trainer.state.fn == pl.trainer.states.TrainerFn.FITTING,
            job.placement.pipeline_parallel_size > 1,
        )
        admission.refuse_lost(self.module)
        admission.check_module(self.module, fitting=fitting, is_pipeline=is_pipeline)
        if is_pipeline or self.options.is_layered or self.options.asked.is_layered:
            admission.refuse_hidden_metrics(self.module)
        if fitting:
            replicas = job.placement.data_parallel_size
            admission.check_run(self.module, trainer, is_pipeline=is_pipeline, num_replicas=replicas)
        admission.check_tensor_parallel(self.module, trainer, self.options.asked.tensor_parallel_size)
        context.builder.adopt(self.module)
        agreement.compare_ranks(agreement.module_facts(self.module), job.connection.world_size)
        strategy: Any = trainer.strategy
        with context.builder.building():
            strategy.model = strategy.precision_plugin.convert_module(strategy.model)
            strategy.model_to_device()
        seed: int = job.connection.broadcast(agreement.choose_seed())
        saved = context.loaded_state.take("seed")
        if fitting and saved is not None:  # dropout continues as before the checkpoint
            seed = saved
        dtensor.check_axes([*self.module.named_parameters(), *self.module.named_buffers()], job.device_mesh)
        agreement.broadcast_module(self.module, job.groups, job.placement)
        agreement.share_random_state(job.groups)
        return seed

    def _begin(self, groups: ParameterGroups | None = None) -> None:
        """At the end of set-up, install what keeps hooks, metrics, signals, the module's own state and random numbers consistent over ranks.

        Args:
            groups: the parameter groups of a fit's optimizers.
        """
        trainer, job, undo = self.trainer, self.job, self.context.undo
        is_split = job.placement.world_size > job.placement.data_parallel_size
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        schedulers = [config.scheduler for config in trainer.strategy.lr_scheduler_configs]
        read = steps_whose_state_is_read(self.module, callbacks, schedulers)
        self._state_each_batch = read.union(*job.connection.all_gather(read))  # a callback may be on one rank only
        if job.connection.world_size > 1:
            self._signals = undo.enter_context(BatchSignals(trainer, job.connection.watch, self.context.snapshots))
            host, watch = job.groups.everyone_on_host, job.connection.watch
            self._lockstep = undo.enter_context(
                Lockstep(trainer, self._signals, host, job.explaining, watch, self.context.snapshots)
            )
            if watch is not None:
                undo.callback(setattr, watch.heartbeat, "where", watch.heartbeat.where)
                watch.heartbeat.where = self._where
            undo.enter_context(
                replica_metrics(trainer, self.module, job.groups.data_parallel, self.lifted, is_split=is_split)
            )
        if self.context.snapshots is not None:
            undo.enter_context(self.context.snapshots.attached(self.pipeline, self.context.loaded_state))
        monitor = make_monitor(self.options.monitor)
        monitored = any(isinstance(c, TimelineMonitor) for c in callbacks)
        monitors = [] if monitor is None or monitored else [monitor]
        if job.connection.world_size > 1 or self.options.is_layered:
            undo.enter_context(refusing_in_threads())
            self._tripwires = undo.enter_context(
                Tripwires(
                    trainer,
                    self.pipeline,
                    job,
                    groups=groups,
                    rank_of=self._rank_of,
                    absent=self.absent,
                    before=self.receive_module_state,
                )
            )
        if is_split:
            pipeline_rank, _, tensor_rank = job.placement.coordinate(job.connection.rank)
            undo.enter_context(writing_once(trainer, writes=pipeline_rank == tensor_rank == 0))
        undo.enter_context(extra_callbacks(trainer, first=[ModuleStateSync()], last=monitors))
        agreement.share_random_state(job.groups)
        self._state.watch()
        self.is_open = True

    @property
    def is_inside_part(self) -> bool:
        """Whether this rank is running a part of a user's step now: for one stage, or for one microbatch."""
        return self.is_open and (self.driver.is_inside_part or self._whole_driver.is_inside_part)

    @property
    def is_inside_step(self) -> bool:
        """Whether this rank is performing the actions of a step."""
        return self._action() is not None

    def _action(self) -> Action | None:
        actions = [d.runner.current_action for d in (self.driver, self._whole_driver)] if self.is_open else []
        return next((action for action in actions if action is not None), None)

    def _where(self) -> tuple[str, bool]:
        """Return where this rank is, in words, and whether it performs the actions of a step; called in another thread."""
        step, action = f"in step {self.trainer.global_step}", self._action()
        return (step, False) if action is None else (f"{step}, {action.describe()}", True)

    def absent(self) -> Absent:
        """Return what this rank lacks of the module between steps."""
        return Absent(
            shards=None if self.options.optimizer_nodes else self.stage_shards,
            waiting=self.context.builder.waiting,
            # not before the first batch, which makes the plan
            is_split=self.job.placement.pipeline_parallel_size > 1 and self.pipeline.num_stages > 1,
        )

    def lifted(self) -> AbstractContextManager[None]:
        """Return a context in which Tripwires is inactive, for the strategy's own work inside a hook of the user. In such a hook all ranks must
        call."""
        return nullcontext() if self._tripwires is None else self._tripwires.lifted()

    @property
    def ends_together(self) -> bool:
        """Whether a signal has ended the run on all ranks at the same place, and no rank has failed."""
        return self.is_open and self._signals is not None and self._signals.ends_together

    def _end(self) -> None:
        """Give every rank the whole trained module again, unless the run has failed."""
        hurries, self.is_open = self.ends_together, False  # after a signal, the remaining time is for the checkpoint
        self.pipeline.uninstall()
        for parameter in self.pipeline.parameters.values():
            forget(parameter)
        in_shards = self.context.module_shards.of(self.module) is not None
        if self.context.builder.leave(self.pipeline, in_shards=in_shards) or self.planned is None:
            pass  # a module built without memory may not fit one process, and each rank keeps its part; or nothing was released
        elif not hurries and not self.job.connection.failed:
            self._fill_whole_module(keep_local=False)
        elif not hurries and self.job.placement.pipeline_parallel_size > 1 and self.stage_shards is None:
            admission.note_lost(self.module, "each rank of a pipeline held the parameters of its own stages")
        vars(self).pop("driver", None)  # it may hold a graph, and so the module's tensors
        vars(self).pop("_whole_driver", None)

    # steps

    def evaluation_step(self, step_name: str, batch: Any, *arguments: Any) -> Any:
        """Run a batch through the pipeline, forward only, and return its output, on every rank."""
        sample = StepSample(step_name=step_name, batch=batch, arguments=arguments)
        wanted = self.options.asked.eval_num_microbatches
        with self.job.explaining():
            self._learn(sample)
            place = _EVALUATION[step_name], *self._loops.num_before(step_name)
            request = self.request(sample, 1 if wanted == "auto" else wanted, place)
            output = self.step(request)
            if request.is_last and step_name != "predict_step":  # Lightning computes metrics now
                self.synchronise_module_state()
            return output

    def step(self, request: StepRequest) -> Any:
        """Run a batch through the pipeline, and return its output."""
        step_name = request.step_name
        with self._counting_replicas():
            if step_name in self._whole_steps:
                alone = replace(request, exchange=None)  # all parameters are here
                result = self.with_whole_module(lambda: self._whole_driver.run(alone))
            else:
                result = self.driver.run(request)
        if step_name in self._state_each_batch:
            self._hooks_have_run = True
            self._state.send()
            if not self._receives_later(step_name):
                self._state.receive()
        if result.calls:
            replay(self.module, result.calls, self.job.connection.device)
        return result.output

    def request(self, sample: StepSample, num_microbatches: int, place: tuple[int, ...]) -> StepRequest:
        """Return the request to run a step, forward only, on the module's present state; all ranks of the pipeline must call.

        Args:
            place: the batch's place among all batches, from which its random seed is derived.
        """
        self.receive_module_state()
        self._pass_over_hooks()
        self._hooks_have_run = False
        step_name, trains = sample.step_name, sample.step_name == "training_step"
        replica = self.job.groups.data_parallel_rank
        return StepRequest(
            step_name=step_name,
            batch=sample.batch,
            arguments=sample.arguments,
            num_microbatches=num_microbatches,
            seed=derive_seed(self.base_seed, *place),
            replica=replica,
            is_last=self._loops.is_last_batch(sample),
            broadcasts=self._source.broadcasts(
                step_name,
                sample.batch,
                functools.partial(self._loops.loaders_of, step_name),
                index=0 if trains else sample.loader_index,
                replica=(replica, self.job.placement.data_parallel_size),
            ),
            merges=self.known.merges.get(step_name, {}),
            divisors=() if self.known.dependence else self.known.divisors,
            refuses=self.options.asked.num_microbatches == "auto",
            context=functools.partial(step_context, self.trainer, step_name),
            fixes_options=step_name == "training_step"
            and isinstance(self.exchange, RemoteReducer)
            and self.exchange.is_eager,
            may_skip=self.job.connection.world_size == 1,
            exchange=self.exchange,
        )

    def _receives_later(self, step_name: str) -> bool:
        """Whether the module's state may be received later, because the work after the step does not read it."""
        return False

    def receive_module_state(self) -> None:
        """Wait for the state that other ranks' last step has left on the module, if it is on its way."""
        if not self.job.connection.failed:
            with self.job.explaining():
                self._state.receive()

    def _pass_over_hooks(self) -> None:
        """Take what hooks have changed since the last step as this rank's own: each rank runs them."""
        if self._hooks_have_run:
            self._state.watch()

    def synchronise_module_state(self) -> None:
        """Bring the state that steps have left on the module, and metrics, to every rank of the pipeline; all ranks must call."""
        if not self.job.connection.failed:
            with self.job.explaining():
                self._pass_over_hooks()
                self._state.synchronise()
            self._hooks_have_run = True


class Evaluation(Run):
    """A run of validation, test or prediction."""

    def __init__(self, trainer: "pl.Trainer", context: RunContext) -> None:
        super().__init__(trainer, context)
        trainer.strategy.setup_precision_plugin()
        self._begin()
        if self.job.placement.pipeline_parallel_size > 1 and self.stage_shards is None:
            context.undo.enter_context(swapping_whole(trainer, self._whole))

    def _whole(self, act: Callable[[], None]) -> None:
        if self.planned is None:  # the module is still whole
            act()
        else:
            self.with_whole_module(act)

    def _learn(self, sample: StepSample) -> None:
        if self.planned is None:
            self._make_plan([sample])
            self._install()
