"""Measure what splitting the backward costs on the real stages, in the first batches of a run and at no extra work.

    meter = SplitMeter(device)                # observes the steps
    ...                                       # the first batches run by 1F1B, every other backward in two parts
    meter.costs()                             # {stage: StageSeconds(...)}; None for stages that cannot be split

Split and whole backwards give the same gradients, so the measurement does not change the run.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_holmes.errors import UnsupportedModuleError
from lightning_holmes.pipeline.observer import UNOBSERVED, StepObserver
from lightning_holmes.pipeline.split_backward import Accumulate, SplitBackward
from lightning_holmes.plan.measured import EventKind
from lightning_holmes.plan.schedule import Action
from lightning_holmes.plan.split_choice import StageSeconds

_MEMORY_SHARE = 0.92  # the rest is fragmentation and libraries


class SplitMeter(StepObserver):
    """Times forwards and backwards of this rank's stages. Stops splitting on a stage whose backward cannot be split.

    Marks and events are passed on to the observer ``other``, so that it goes on recording.
    """

    minds_checkpointing = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.other = UNOBSERVED
        self._held: dict[int, float] = {}
        self._forward: dict[int, list[float]] = defaultdict(list)
        self._whole: dict[int, list[float]] = defaultdict(list)
        self._parts: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self._unsplittable: set[int] = set()

    def mark(self) -> Any:
        """Return a mark of ``other``."""
        return self.other.mark()

    def add(self, kind: EventKind, start: Any, stage: int = -1, microbatch: int = -1) -> Any:
        """Pass the event on to ``other``."""
        return self.other.add(kind, start, stage, microbatch)

    def performed(self, action: Action) -> None:
        """Pass the action on to ``other``."""
        self.other.performed(action)

    def cannot_split(self, stage: int) -> None:
        """Note that the backward of ``stage`` must stay whole."""
        self._unsplittable.add(stage)

    @contextmanager
    def forward(self, stage: int) -> Iterator[None]:
        """Context around the forward of ``stage``: times it, and on CUDA measures the memory that it holds."""
        before, began = self._allocated(), self._now()
        yield
        self._forward[stage].append(self._now() - began)
        self._held[stage] = max(self._held.get(stage, 0.0), self._allocated() - before)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _allocated(self) -> float:
        return float(torch.cuda.memory_allocated(self._device)) if self._device.type == "cuda" else 0.0

    def _room(self) -> float:
        """Bytes that the device could hold beyond the peak allocation; infinite on a CPU."""
        if self._device.type != "cuda":
            return math.inf  # a host's memory is not for this process alone, so no limit is set
        total = float(torch.cuda.mem_get_info(self._device)[1])
        return _MEMORY_SHARE * total - float(torch.cuda.max_memory_allocated(self._device))

    def backward(
        self,
        stage: int,
        roots: Sequence[Tensor],
        gradients: Sequence[Tensor],
        received: Sequence[Tensor],
        parameters: Mapping[str, nn.Parameter],
        accumulate: Accumulate,
    ) -> None:
        """Run a backward, alternately whole and in two parts."""
        splits = stage > 0 and stage not in self._unsplittable and any(t.requires_grad for t in received)
        if stage > 0 and not splits:
            self.cannot_split(stage)
        began = self._now()
        if splits and len(self._whole[stage]) > len(self._parts[stage]):
            parts = SplitBackward(roots, gradients, received, parameters)
            try:
                parts.input(accumulate)
            except (
                RuntimeError,
                UnsupportedModuleError,
            ):  # compiled code, say, cannot be gone through twice, but can be once
                self.cannot_split(stage)
                torch.autograd.backward(list(roots), list(gradients))
                return
            between = self._now()
            parts.weight(accumulate)
            self._parts[stage].append((between - began, self._now() - between))
        else:
            torch.autograd.backward(list(roots), list(gradients))
            self._whole[stage].append(self._now() - began)

    def costs(self) -> dict[int, StageSeconds | None]:
        """The fastest times by stage: the first runs are slow, and other processes use the machine now and then. None
        for a stage that cannot be split, or was not measured in both ways."""
        found: dict[int, StageSeconds | None] = {}
        for stage, forwards in self._forward.items():
            whole, parts = self._whole[stage], self._parts[stage]
            if stage in self._unsplittable or not whole or (stage > 0 and not parts):
                found[stage] = None
                continue
            fastest = min(parts, key=sum) if parts else (0.0, min(whole))
            found[stage] = StageSeconds(
                forward_s=min(forwards),
                backward_s=min(whole),
                input_s=fastest[0],
                weight_s=fastest[1],
                held_bytes=self._held.get(stage, 0.0),
                room_bytes=self._room(),
            )
        return found
