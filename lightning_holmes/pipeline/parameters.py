"""StageParameters: this rank's parameters in the order in which the backward finishes them, and the stages and ranks
that share them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.pipeline.structure import BEFORE


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParameters:
    """What a reduction of gradients needs to know about a rank's stages.

    Attributes:
        by_name: parameters by name, in the order in which the backward finishes their gradients: those of the last
            layers first. With several stages on a rank, a parameter is finished with the first stage that reads it.
            Parameters that are first read at the same position, or at no known position, come in reverse order of
            definition.
        stages_of: for each parameter, the stages of this rank that read it; empty if the module is run whole.
        shared: parameters that several pipeline ranks hold: the ranks, and the names in the same order on all of them.
    """

    by_name: Mapping[str, nn.Parameter]
    stages_of: Mapping[str, frozenset[int]]
    shared: Mapping[tuple[int, ...], list[str]]

    @classmethod
    def of(cls, pipeline: PipelineModule, rank_of: Callable[[int], int]) -> "StageParameters":
        """Make the parameters of ``pipeline``, whose stages are on the pipeline ranks ``rank_of(stage)``."""
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
