"""The runner performs the schedule: every action, in its order, and no other."""

import functools
from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from simulated import SimulatedPipeline, simulated
from tanh_net import TanhNet
from torch import Tensor
from torch.profiler import profile

from lightning_holmes.checking import first_step
from lightning_holmes.checking.in_turns import LocalP2P
from lightning_holmes.comm.parameter_exchange import LocalExchange
from lightning_holmes.pipeline import runner
from lightning_holmes.pipeline.device_calls import DeviceCalls
from lightning_holmes.pipeline.request import StepRequest
from lightning_holmes.pipeline.runner import PipelineRunner
from lightning_holmes.pipeline.steps import StepDriver
from lightning_holmes.plan.schedule import SCHEDULE_NAMES, SCHEDULES, Action, Op, make_schedule
from lightning_holmes.torch_private import profiling_all_threads

NUM_MICROBATCHES = 3


class Recorder(PipelineRunner):
    """Records the actions that a rank performed, and those at whose end a stage had no backward left."""

    actions: list[Action]
    ended: list[Action | None]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "current_action" and value is not None:
            self.actions.append(value)


class Arriving:
    """Parameters that are NaN until ``wait`` is called."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._values = [parameter.detach().clone() for parameter in parameters]
        self._parameters = parameters
        for parameter in parameters:
            parameter.data.fill_(float("nan"))

    def wait(self) -> None:
        for parameter, value in zip(self._parameters, self._values, strict=True):
            parameter.data.copy_(value)


class Exchange(LocalExchange):
    """Delivers parameters late, and notes the actions during which backwards ended."""

    def __init__(self, driver: StepDriver, ended: list[Action | None]) -> None:
        super().__init__(driver.module)
        self._driver, self.ended = driver, ended

    def backward_ended(self, stage: int) -> None:
        self.ended.append(self._driver.runner.current_action)

    def unshard(self, stage: int) -> Any:
        return Arriving(list(self._driver.pipeline.parameters_of(stage).values()))


@contextmanager
def pipeline_of(schedule: str, size: int, chunks: int):
    """Yield the ranks of a pipeline over :class:`TanhNet` in this process, the module, and a batch."""
    torch.manual_seed(0)
    module, batch = TanhNet(), torch.randn(6, 4)
    with first_step.attached(module):
        yield simulated(module, batch, size, schedule, chunks), module, batch


def run(pipeline: SimulatedPipeline, batch: Tensor, *, trains: bool) -> list[Recorder]:
    """Run one step on all ranks in turn."""

    def scales(weights: Sequence[float]) -> Callable[[], list[float]]:
        return lambda: [weight / sum(weights) for weight in weights]

    def start(driver: StepDriver) -> Recorder:
        recorder: Any = driver.runner
        recorder.__class__ = Recorder
        recorder.actions, recorder.ended = [], []
        request = StepRequest(
            step_name="training_step",
            batch=batch.clone(),
            arguments=(0,),
            num_microbatches=NUM_MICROBATCHES,
            seed=1,
            context=nullcontext,
            loss_scales=scales if trains else None,
            exchange=Exchange(driver, recorder.ended),
        )
        with torch.set_grad_enabled(trains):
            driver.run(request)
        return recorder

    return pipeline.turns.run([functools.partial(start, driver) for driver in pipeline.drivers])


CASES = [
    (name, 2, 2 if SCHEDULES[name].is_chunked else 1, trains) for name in SCHEDULE_NAMES for trains in (True, False)
]


OTHERS = [("gpipe", 1, 1, True), ("1f1b", 1, 1, True), ("1f1b", 4, 1, True), ("breadth_first", 1, 4, True)]


@pytest.mark.parametrize(("name", "size", "chunks", "trains"), [*CASES, *OTHERS])
def test_what_runs_is_the_schedule(name: str, size: int, chunks: int, trains: bool) -> None:
    with pipeline_of(name, size, chunks) as (pipeline, _, batch):
        recorders = run(pipeline, batch, trains=trains)
    schedule = make_schedule(
        name, pipeline_parallel_size=size, num_microbatches=NUM_MICROBATCHES, num_chunks=chunks, forward_only=not trains
    )
    for rank, (recorder, actions) in enumerate(zip(recorders, schedule.actions, strict=True)):
        assert recorder.actions == list(actions)
        last = {a.stage: a for a in actions if a.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)}
        assert recorder.ended == sorted(last.values(), key=actions.index), "a send came before the stage's sums"
        assert not trains or set(last) == set(schedule.stages_of(rank))


@pytest.mark.parametrize(
    ("name", "size", "chunks"),
    [("1f1b", 2, 1), ("zero_bubble_v", 2, 2), ("breadth_first", 2, 2), ("breadth_first", 1, 4)],
)
def test_parameters_that_arrive_late_change_nothing(name: str, size: int, chunks: int) -> None:
    """A computation that did not wait for its fetch would get NaN."""
    with pipeline_of(name, size, chunks) as (pipeline, module, batch):
        run(pipeline, batch, trains=True)
        found = pipeline.gradients()
    module.training_step(batch, 0).backward()
    for parameter_name, parameter in module.named_parameters():
        torch.testing.assert_close(found[parameter_name], parameter.grad)


class Counted:
    """A receive that is counted from its posting to its wait."""

    def __init__(self, receive: Any, under_way: list[int]) -> None:
        self._receive, self._under_way = receive, under_way

    def post(self) -> None:
        self._under_way.append(self._under_way[-1] + 1)
        self._receive.post()

    def wait(self) -> list[Tensor]:
        found: list[Tensor] = self._receive.wait()
        self._under_way.append(self._under_way[-1] - 1)
        return found


@pytest.mark.parametrize("trains", [True, False])
def test_receives_are_posted_ahead_only_after_a_batch_in_which_cuda_has_allocated_nothing(
    trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading kernels, allocating and freeing may wait for the device, and so for whom a posted receive waits for."""
    under_way = [0]
    prepare = LocalP2P.prepare
    # what CUDA does in a batch, and has done so far
    more, calls = {"number": 0, "flushes": 0}, {"number": 0, "flushes": 0}

    def counted(self: LocalP2P, *arguments: Any) -> Counted:
        return Counted(prepare(self, *arguments), under_way)

    def called() -> DeviceCalls:
        for kind, number in more.items():
            calls[kind] += number
        return DeviceCalls(**calls)

    monkeypatch.setattr(LocalP2P, "prepare", counted)
    monkeypatch.setattr(runner, "device_calls", called)
    with pipeline_of("1f1b", 2, 1) as (pipeline, _, batch):
        most = []
        for more["number"], more["flushes"] in ((9, 0), (0, 0), (2, 2), (0, 0), (0, 0)):
            for driver in pipeline.drivers:
                driver.runner.p2p.finish()
            warned = pytest.warns(
                UserWarning, match="so full that a batch of training_step has freed all cached memory"
            )
            with warned if more["flushes"] else nullcontext():
                run(pipeline, batch, trains=trains)
            assert under_way[-1] == 0
            most.append(max(under_way))
            under_way[:] = [0]
    at_need, ahead = (2, 3) if trains else (1, 2)
    assert most == [at_need, at_need, ahead, at_need, ahead]
    # at once, of both ranks: in an evaluation only the second one receives


def test_a_profile_names_each_action_with_its_layers() -> None:
    with (
        pipeline_of("1f1b", 2, 1) as (pipeline, _, batch),
        profile(experimental_config=profiling_all_threads()) as profiler,
    ):
        run(pipeline, batch, trains=True)
    labels = [event.name for event in profiler.events() if event.name.startswith("holmes: ")]
    assert "holmes: forward of stage 0, microbatch 2 (layers.0 to layers.1)" in labels
    assert "holmes: reduce gradients of stage 1 (layers.2 to layers.3)" in labels
    schedule = make_schedule("1f1b", pipeline_parallel_size=2, num_microbatches=NUM_MICROBATCHES)
    assert len([label for label in labels if " wait for " not in label]) == sum(map(len, schedule.actions))


def test_an_error_shows_the_schedule_with_the_action_that_failed() -> None:
    with pipeline_of("1f1b", 2, 1) as (pipeline, _, batch):

        def fail_at_the_second_microbatch(layer: Any, _: Any) -> None:
            layer.calls = getattr(layer, "calls", 0) + 1
            if layer.calls == 2:
                raise ValueError("a fault")

        staged: Any = pipeline.drivers[1].pipeline.module
        staged.layers[2].register_forward_pre_hook(fail_at_the_second_microbatch)
        with pytest.raises(ValueError, match="a fault") as caught:
            run(pipeline, batch, trains=True)
    microbatch, *_, note = caught.value.__notes__
    assert "microbatch 1 of 3" in microbatch
    assert "of pipeline rank 1, in the forward of stage 1, microbatch 1" in note
    assert "F1.0" in note and note.count(">>> F1.1 <<<") == 1
