"""Each module of wild_modules.py with sharded parameters, on one replica and with as many stages as it allows: exact or
refused.

Baseline: the plain loop of test_wild_modules.py; for modules that draw random numbers, or that the table refuses between
ranks, the same stages with whole parameters. Tolerance: 1e-5 relative for the loss; gradients rtol 1e-4, atol 1e-5 of the
largest entry.
"""

import dataclasses
from typing import Any

import pytest
import torch
from groups_alone import ALONE
from simulated import SimulatedPipeline, structure_of
from torch import Tensor
from wild.test_wild_modules import plain_loop
from wild.wild_modules import CASES, Case

from lightning_holmes.checking import first_step
from lightning_holmes.comm.absent import HeldParameter
from lightning_holmes.comm.queue import make_comm_queue
from lightning_holmes.errors import HolmesError
from lightning_holmes.optim.layered import LayeredReducer
from lightning_holmes.optim.stage_shards import StageShards
from lightning_holmes.pipeline.batch import BatchSplitter
from lightning_holmes.pipeline.parameters import StageParameters
from lightning_holmes.pipeline.structure import ModuleStructure
from lightning_holmes.plan.partition import Partition
from lightning_holmes.plan.placement import Placement

CPU = torch.device("cpu")
REFUSED = {
    "MaxNorm": "the step changes layers.0.linear",
    "EmbeddingMaxNorm": "the step changes embed.weight",
    "MeanTeacher": "the step changes teacher",
    "OwnBackward": "calls backward: a pipeline runs the backward itself",
    "OwnGenerator": "self.generator, a generator of its own",
}
"""Modules refused with sharded parameters. What the table of wild_modules.py refuses may run here, on one rank, and must be exact then."""


def stages(structure: ModuleStructure) -> Partition:
    """Return a partition with as many stages as lose no value on one rank."""
    cuts = structure.forbidden_cuts(one_rank=True)
    free = [] if structure.early_changes else [p for p in range(structure.num_layers - 1) if p not in cuts]
    ends = [*(point + 1 for point in free), structure.num_layers]
    return Partition(tuple(end - start for start, end in zip([0, *ends], ends, strict=False)))


def run(case: Case, *, in_shards: bool) -> tuple[Any, dict[str, Tensor]]:
    """Return the output and the gradients of a training step."""
    module, batch = case.make()
    splitter, count = BatchSplitter(), case.options.get("num_microbatches", 2)
    with first_step.attached(module):
        structure: ModuleStructure | None = None
        partition = Partition((1,))
        try:
            structure = structure_of(module, batch)
            partition = stages(structure)
        except Exception as error:  # as in a run on one rank, the module then runs whole
            assert case.refused, f"exact on two stages, but not traced here: {error}"
            structure, partition = None, Partition((1,))
        chunks = partition.num_stages
        schedule = "breadth_first" if chunks > 1 else "1f1b"
        cast = SimulatedPipeline(module, structure, partition, 1, schedule, chunks, splitter)
        (driver,) = cast.drivers
        if not in_shards:
            cast.run("training_step", batch, count)
            return cast.results[0].output, {n: g for n, g in cast.gradients().items() if g is not None}
        reducer = reducer_of(driver.pipeline)
        own = driver.run
        driver.run = lambda request: own(dataclasses.replace(request, exchange=reducer))  # type: ignore[method-assign]
        try:
            reducer.begin(last=True)
            cast.run("training_step", batch, count)
            reducer.end()
            reducer.finish(last=True)
            reached = reducer.reached()
            found = {
                name: view
                for unit in reducer.units
                if unit.gradient is not None
                for name, view in unit.views(unit.gradient).items()
                if name in reached
            }
        finally:
            reducer.close()
        assert not any(isinstance(p, HeldParameter) for p in reducer.parameters.values())
        return cast.results[0].output, found


def reducer_of(pipeline: Any) -> LayeredReducer:
    parameters, queue = StageParameters.of(pipeline, lambda stage: 0), make_comm_queue(CPU)
    shards = StageShards(
        parameters.by_name,
        stages=pipeline.stages,
        stages_of=parameters.stages_of,
        shared={},
        size=1,
        rank=0,
        queue=queue,
        collective=None,
        absence=pipeline.absence,
        compiled=pipeline.compiled_parameters,
    )
    shards.lay_out(by_elements=True)
    return LayeredReducer(shards, ALONE, Placement(((0,),)))


STEPS = [case for case in CASES if case.refused != "manual optimization"]  # which is refused before a step


@pytest.mark.parametrize("case", STEPS, ids=[c.name for c in STEPS])
def test_exact_or_refused_in_shards(case: Case) -> None:
    try:
        output, found = run(case, in_shards=True)
    except HolmesError as error:
        reason = REFUSED.get(case.name) or case.refused
        assert reason, f"not in the table: {type(error).__name__}: {error}"
        assert reason in str(error)
        return
    assert case.name not in REFUSED
    if case.random or case.refused:
        whole, expected = run(case, in_shards=False)
        loss = float(whole["loss"] if isinstance(whole, dict) else whole)
    else:
        module, batch = case.make()
        loss, expected, _ = plain_loop(module, batch, case.options.get("num_microbatches", 2))
    assert float(output["loss"] if isinstance(output, dict) else output) == pytest.approx(loss, rel=1e-5)
    assert set(expected) <= set(found)
    scale = max((float(g.abs().max()) for g in expected.values()), default=1.0)
    for name, gradient in found.items():
        want = expected.get(name, torch.zeros_like(gradient))
        torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")
