"""Where stages live: which pipeline rank holds which stages, as the schedule wants it. Plain data.

    rank_of_stage("interleaved_1f1b", 5, pipeline_parallel_size=4)      # 1: stages go round and round
    rank_of_stage("zero_bubble_v", 5, pipeline_parallel_size=4)         # 2: down to the last rank and back up

    round and round (loop)             V
    rank 0: 0 4                        rank 0: 0 7
    rank 1: 1 5                        rank 1: 1 6
    rank 2: 2 6                        rank 2: 2 5
    rank 3: 3 7                        rank 3: 3 4

In a V the last rank hands its first stage's output to its second stage without a transfer, and the first rank holds
both ends of the model, so that a microbatch's backward begins where its forward did.
"""

from __future__ import annotations

V_SHAPED = frozenset({"zero_bubble_v"})


def rank_of_stage(schedule: str, stage: int, *, pipeline_parallel_size: int) -> int:
    """The pipeline rank on which a stage lives."""
    chunk, place = divmod(stage, pipeline_parallel_size)
    return pipeline_parallel_size - 1 - place if schedule in V_SHAPED and chunk % 2 else place


def stages_of_rank(schedule: str, rank: int, *, pipeline_parallel_size: int, num_chunks: int) -> tuple[int, ...]:
    """The stages of a pipeline rank, ascending, one a chunk."""
    size = pipeline_parallel_size
    back = size - 1 - rank if schedule in V_SHAPED else rank
    return tuple(chunk * size + (back if chunk % 2 else rank) for chunk in range(num_chunks))


def ranks_of_stages(schedule: str, *, pipeline_parallel_size: int, num_chunks: int) -> tuple[int, ...]:
    """The pipeline rank of every stage."""
    return tuple(
        rank_of_stage(schedule, stage, pipeline_parallel_size=pipeline_parallel_size)
        for stage in range(pipeline_parallel_size * num_chunks)
    )
