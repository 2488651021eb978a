"""StageParameters: this rank's parameters as the backward finishes them, and which stages and ranks share them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.pipeline.structure import BEFORE


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParameters:
    """What a reduction of gradients needs to know of a rank's stages.

    Attributes:
        by_name: in the order in which the backward finishes them: the last layers' first. With several stages on a rank, a
            parameter is finished with the first stage that reads it; at a place, and where no place is known, those that
            are defined last come first.
        stages_of: of each parameter, the stages of this rank that read it; empty for a module that is run whole.
        shared: parameters that several pipeline ranks hold: the ranks, and the names in the same order on all.
    """

    by_name: Mapping[str, nn.Parameter]
    stages_of: Mapping[str, frozenset[int]]
    shared: Mapping[tuple[int, ...], list[str]]

    @classmethod
    def of(cls, pipeline: PipelineModule, rank_of: Callable[[int], int]) -> "StageParameters":
        """Of ``pipeline``, whose stages live on the pipeline ranks ``rank_of(stage)``."""
        local = pipeline.local_parameters
        parameters = [(n, p) for n, p in pipeline.parameters.items() if n in local][::-1]
        structure = pipeline.structure
        if structure is None:
            return cls(by_name=dict(parameters), stages_of={}, shared={})
        readers = structure.readers
        parameters.sort(key=lambda named: -min(readers.get(named[0]) or (BEFORE,)))
        own = frozenset(pipeline.stages)
        shared: dict[tuple[int, ...], list[str]] = {}
        for name in readers:
            ranks = tuple(sorted({rank_of(stage) for stage in structure.stages_of(pipeline.partition, name)}))
            if len(ranks) > 1:
                shared.setdefault(ranks, []).append(name)
        return cls(
            by_name=dict(parameters),
            stages_of={name: own.intersection(structure.stages_of(pipeline.partition, name)) for name in local},
            shared=shared,
        )
