"""What a fit does with gradients, made together: the reducer, the exchange that a step's schedule calls, and the host."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_holmes.comm.exchange import ParameterExchange
from lightning_holmes.comm.mesh import ProcessGroups
from lightning_holmes.comm.sync_board import SyncBoard
from lightning_holmes.optim.exchange import Replicated, ShardedStates
from lightning_holmes.optim.gradient_options import GradientOptions
from lightning_holmes.optim.host import LocalHost, OptimizerHost, ShardedHost
from lightning_holmes.optim.reducer import GradientReducer
from lightning_holmes.optim.sharded import ShardedOptimizer
from lightning_holmes.pipeline.parameters import StageParameters
from lightning_holmes.pipeline.stage import PipelineModule
from lightning_holmes.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Of one fit on one rank: gathered and reduced by ``reducer``, when ``exchange`` is told, for the optimizer of ``host``."""

    reducer: GradientReducer
    exchange: ParameterExchange
    host: OptimizerHost

    def close(self) -> None:
        """Give the optimizer back what it had, and let go of buffers, hooks and the queue."""
        self.host.close()
        self.reducer.close()


def make_gradients(
    pipeline: PipelineModule,
    groups: ProcessGroups,
    plan: Plan,
    device: torch.device,
    *,
    scaler: Any,
    shard: Callable[[GradientReducer], ShardedOptimizer | None],
    options: GradientOptions,
    board: SyncBoard | None,
    flat: bool,
) -> Gradients:
    """All ranks must call.

    Args:
        scaler: of ``precision="16-mixed"``, or None.
        shard: shards the optimizer over the replicas, if that is asked for or better.
        board: where groups of replicas tell how they sum; None where there are none.
        flat: keep flat buffers even where nothing is reduced.
    """
    parameters = StageParameters.of(pipeline, plan.rank_of)
    reducer = GradientReducer(
        parameters.by_name,
        groups,
        plan.placement,
        device,
        stages=pipeline.stages,
        stages_of=parameters.stages_of,
        shared=parameters.shared,
        options=options,
        board=board,
        flat=flat,
    )
    shards = shard(reducer)
    host = LocalHost if shards is None else functools.partial(ShardedHost, shards)
    return Gradients(
        reducer=reducer,
        exchange=Replicated(reducer) if shards is None else ShardedStates(reducer, shards),
        host=host(
            reducer.buffer,
            groups,
            device,
            is_owner=pipeline.is_owner,
            scaler=scaler,
            place=f"stage {', '.join(map(str, pipeline.stages))}",
        ),
    )
