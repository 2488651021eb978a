"""``check``: run a module's steps plainly and as a pipeline, in one process, and compare them.

No network and no Trainer run: transfers go through memory, everything else is what a real run uses. Use it first on a
new module.

    report = lightning_holmes.check(module, batch, pipeline_parallel_size=2, num_microbatches=4)
    report.print()
    assert report.ok
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_holmes.checking.check_report import CheckReport, Outcome, compare
from lightning_holmes.checking.first_step import at_first_step
from lightning_holmes.checking.in_turns import LocalP2P, Turns
from lightning_holmes.cluster.topology import Topology
from lightning_holmes.errors import ConfigurationError, HolmesError, UnsupportedModuleError
from lightning_holmes.lightning_package import pl
from lightning_holmes.lightning_private import set_trainer, trainer_of
from lightning_holmes.pipeline import tree
from lightning_holmes.pipeline.batch import BatchSplitter
from lightning_holmes.pipeline.batch_dependence import find_batch_dependence
from lightning_holmes.pipeline.module_state import ModuleState
from lightning_holmes.pipeline.outside import Outside
from lightning_holmes.pipeline.request import StepRequest, StepResult
from lightning_holmes.pipeline.shadow import replace_parameters, shadow_copy
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.pipeline.steps import StepDriver
from lightning_holmes.pipeline.structure import ModuleStructure
from lightning_holmes.pipeline.trace import trace_step
from lightning_holmes.plan.asked import Asked
from lightning_holmes.plan.partition import Partition
from lightning_holmes.plan.placement import Placement
from lightning_holmes.plan.planner import Known, choose
from lightning_holmes.plan.schedule import SCHEDULE_NAMES, ScheduleName, spec_of
from lightning_holmes.strategy import admission
from lightning_holmes.strategy.options import check_layout
from lightning_holmes.strategy.samples import step_arguments

_SEED = 20231203


def check(
    module: pl.LightningModule,
    batch: Any,
    *,
    pipeline_parallel_size: int = 2,
    num_microbatches: int = 2,
    schedule: ScheduleName = "1f1b",
    num_chunks: int = 1,
    layers: str = "auto",
    partition: Literal["self_adapting", "uniform"] | Sequence[int] = "uniform",
    steps: Iterable[str] = ("training_step", "validation_step"),
    tolerance: float = 1e-5,
) -> CheckReport:
    """Compare a module run plainly with the same module run as a pipeline, on one batch in one process.

    The plain run uses the module unchanged, except that the layers of a module that draws random numbers are seeded as in a pipeline. Both
    runs use the same microbatches. The loss, every gradient, every logged value, and the state that the steps leave on the module are compared.
    The module itself is not changed. Arguments that are not listed are as for HolmesStrategy; costs are not known here, so that "self_adapting"
    assigns layers by count, around split points that lose a value.

    Args:
        module: a LightningModule with all its weights, on the device to use.
        batch: as its loader would give it; for the training step it is split into ``num_microbatches``, other steps
            run it whole.
        steps: which steps to run; those that the module does not define are left out.
        tolerance: the largest relative difference that counts as rounding.

    Returns:
        A report; ``report.ok`` says whether all values were equal. If the module is refused, ``report.refused`` gives
        the reason.

    Raises:
        ConfigurationError: the arguments do not fit together, or the module defines none of ``steps``.
    """
    check_layout(
        pipeline_parallel_size=pipeline_parallel_size,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        schedule=schedule,
        schedules=SCHEDULE_NAMES,
    )
    num_chunks = int(spec_of(schedule).chunks(num_chunks))
    names = [name for name in steps if pl.utilities.model_helpers.is_overridden(name, module)]
    if not names:
        raise ConfigurationError(f"{type(module).__name__} defines none of the steps {', '.join(steps)}")
    report = CheckReport(
        module=type(module).__name__, layers=layers, stages=(), num_microbatches=num_microbatches, tolerance=tolerance
    )
    with Outside(module).preserved(), at_first_step(module, batch, names) as first:
        report.notes = first.notes
        try:
            _check_steps(first.modules, batch, report, pipeline_parallel_size, schedule, num_chunks, partition)
        except Exception as error:
            if not first.notes:
                raise
            # possibly because of the hooks that were left out
            report.refused = f"its step ends with {type(error).__name__}: {error}"
    return report


def _check_steps(
    modules: Mapping[str, pl.LightningModule],
    batch: Any,
    report: CheckReport,
    pipeline_parallel_size: int,
    schedule: str,
    num_chunks: int,
    partition: Any,
) -> None:
    layers, num_microbatches, tolerance = report.layers, report.num_microbatches, report.tolerance
    module = next(iter(modules.values()))
    try:
        admission.check_module(module, fitting="training_step" in modules)
        splitter = BatchSplitter()
        splitter.split(batch, num_microbatches, module)
        structure = _structure(modules, batch, layers, splitter)
        stages = _assign_layers(structure, partition, pipeline_parallel_size, schedule, num_chunks)
        report.layers, report.stages = structure.layers, stages.layer_counts
        structure.check_partition(stages, one_rank=pipeline_parallel_size == 1)
        if num_microbatches > 1 and "training_step" in modules and not structure.changed_parameters:
            arguments = step_arguments(module, "training_step")
            found = find_batch_dependence(module, "training_step", batch, arguments, splitter).dependence
            if found is not None and found.is_cut_along_time:
                raise UnsupportedModuleError(f"num_microbatches={num_microbatches}: {found.reason}")
            if found is not None:
                report.dependence = found.reason
        if num_microbatches > 1 and structure.outside and not report.dependence:
            report.dependence = f"the step changes {structure.outside[0]} once a microbatch"
        for name, module in modules.items():
            count = num_microbatches if name == "training_step" else 1
            plain = _reference(module, structure, name, batch, count, splitter)
            staged = _SimulatedPipeline(
                module, structure, stages, pipeline_parallel_size, schedule, num_chunks, splitter
            )
            staged.run(name, batch, count)
            report.rows += compare(name, plain.outcome(name), staged.outcome(name), tolerance)
    except HolmesError as reason:
        report.refused = str(reason)


def _assign_layers(structure: ModuleStructure, partition: Any, size: int, schedule: str, num_chunks: int) -> Partition:
    """Which layers each stage holds: as in a run whose costs are not known."""
    known = Known(
        topology=Topology.single_cluster(1, size),
        placement=Placement(tuple((rank,) for rank in range(size))),
        layers=structure.layers,
        num_layers=structure.num_layers,
        forbidden_cuts=tuple(structure.forbidden_cuts(one_rank=size == 1)),
    )
    return choose(known, Asked(partition=partition, schedule=schedule, num_chunks=num_chunks)).partition


def _structure(
    modules: Mapping[str, pl.LightningModule], batch: Any, layers: str, splitter: BatchSplitter
) -> ModuleStructure:
    small = batch
    with suppress(HolmesError):  # only the module's ``split_batch`` can split it
        size = splitter.batch_size(batch)
        small = batch if size <= 2 else splitter.split(batch, -(-size // 2))[0]
    structure: ModuleStructure | None = None
    for name, module in modules.items():
        arguments = (tree.map_all_tensors(Tensor.clone, small), *step_arguments(module, name))
        found = trace_step(module, name, arguments, layers=layers if structure is None else structure.layers)
        structure = found if structure is None else structure.merged(found)
    assert structure is not None
    return structure


def _reference(
    module: pl.LightningModule,
    structure: ModuleStructure,
    name: str,
    batch: Any,
    num_microbatches: int,
    splitter: BatchSplitter,
) -> "_SimulatedPipeline":
    """Do the plain run: the module as it is, without gates in its layers.

    A module that draws random numbers runs with the gates that seed each layer, because only then are its numbers
    those of a pipeline. Whether it draws any is found by running it twice with different seeds.
    """
    plain, again = (_SimulatedPipeline(module, None, Partition((1,)), 1, "gpipe", 1, splitter) for _ in range(2))
    plain.run(name, batch, num_microbatches)
    again.run(name, batch, num_microbatches, seed=_SEED + 1)
    if all(row.ok for row in compare(name, plain.outcome(name), again.outcome(name), tolerance=0.0)):
        return plain
    seeded = _SimulatedPipeline(module, structure, Partition((structure.num_layers,)), 1, "gpipe", 1, splitter)
    seeded.run(name, batch, num_microbatches)
    return seeded


class _SimulatedPipeline:
    """A pipeline whose ranks are all in this process, each with its own copy of the module."""

    def __init__(
        self,
        module: pl.LightningModule,
        structure: ModuleStructure | None,
        partition: Partition,
        size: int,
        schedule: str,
        num_chunks: int,
        splitter: BatchSplitter,
    ) -> None:
        self.turns = Turns()
        device = next(module.parameters()).device
        self.partition, self.structure = partition, structure
        self.drivers: list[StepDriver] = []
        self.results: list[StepResult] = []
        for rank in range(size):
            copy = shadow_copy(module)
            set_trainer(copy, trainer_of(module))
            replace_parameters(copy, lambda p: nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad))
            stages = spec_of(schedule).stages_of(rank, size, num_chunks)
            pipeline = PipelineModule(copy, structure, partition, stages, device)
            pipeline.install()
            p2p = LocalP2P(rank, size, self.turns) if size > 1 else None
            driver = StepDriver(
                pipeline, p2p, schedule=schedule, num_chunks=num_chunks, device=device, splitter=splitter
            )
            self.drivers.append(driver)

    def run(self, step_name: str, batch: Any, num_microbatches: int, seed: int = _SEED) -> None:
        """Run one step on all ranks in turn."""
        training = step_name == "training_step"

        def scales(weights: Sequence[float]) -> Callable[[], list[float]]:
            return lambda: [w / (sum(weights) or 1.0) for w in weights]

        def run(driver: StepDriver) -> StepResult:
            if not training:
                driver.module.eval()
            if trainer_of(driver.module) is not None:
                setattr(trainer_of(driver.module), "training" if training else "validating", True)
            request = StepRequest(
                step_name=step_name,
                batch=tree.map_all_tensors(Tensor.clone, batch),
                arguments=step_arguments(driver.module, step_name),
                num_microbatches=num_microbatches,
                seed=seed,
                context=nullcontext,
                loss_scales=scales if training else None,
            )
            with torch.set_grad_enabled(training):
                return driver.run(request)

        self.results = self.turns.run([functools.partial(run, driver) for driver in self.drivers])

    def outcome(self, step_name: str) -> Outcome:
        """The outcome of the step that was run: its results and the state it left on the module."""
        output, calls = self.results[0].output, self.results[0].calls
        gradients = self.gradients() if step_name == "training_step" else {}
        return Outcome(output=output, calls=calls, gradients=gradients, state=self.state(), stages_of=self.stages_of)

    def stages_of(self, name: str) -> tuple[int, ...]:
        """The stages that hold parameter ``name``; none if the module is not split."""
        return () if self.structure is None else self.structure.stages_of(self.partition, name)

    def gradients(self) -> dict[str, Tensor | None]:
        """Gradients by name; those of shared parameters are summed over the stages that hold them."""
        total: dict[str, Tensor | None] = {}
        for driver in self.drivers:
            for name, parameter in driver.module.named_parameters():
                if name not in driver.pipeline.local_parameters or not parameter.requires_grad:
                    continue
                gradient, sofar = parameter.grad, total.get(name)
                total[name] = gradient if sofar is None else sofar if gradient is None else sofar + gradient
        return total

    def state(self) -> dict[str, Any]:
        """Buffers, plain attributes and metric states by name, each from the rank that owns it."""
        found: dict[str, Any] = {}
        for driver in self.drivers:
            pipeline = driver.pipeline
            for name, buffer in driver.module.named_buffers():
                if pipeline.owner_stage(name) in pipeline.stages:
                    found[f"buffer {name}"] = buffer
            state = ModuleState(pipeline, None, driver.device)
            for (owner, key), value in state.attributes().items():
                found[f"attribute {owner}.{key}" if owner else f"attribute {key}"] = value
            for name, metric in pipeline.local_modules():
                if isinstance(metric, Metric):
                    found[f"metric {name}"] = {**metric.metric_state, "updates": metric.update_count}
        return found
