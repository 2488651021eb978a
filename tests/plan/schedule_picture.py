"""A schedule as a picture in ASCII.

print(format_schedule(make_schedule("1f1b", pipeline_parallel_size=2, num_microbatches=3)))
# rank 0 | F0 F1 .  .  B0 == F2 B1 == .  B2 ==
# rank 1 | .  F0 B0 == F1 B1 == F2 B2 == .  .
"""

from __future__ import annotations

from schedule_checks import SLOTS, start_slots

from lightning_holmes.plan.schedule import Op, Schedule


def format_schedule(schedule: Schedule) -> str:
    """A picture in ASCII: a row per rank, a column per slot; a whole backward takes two ("B0 =="), "." is idle.

    With one chunk per rank the number is the microbatch; with several it is stage.microbatch. Transfers are
    drawn as if they took no time.
    """
    rows = start_slots(schedule)
    length = max(start + SLOTS[action.op] for row in rows for start, action in row)
    cells = [["."] * length for _ in rows]
    for cell, row in zip(cells, rows, strict=True):
        for start, action in row:
            cell[start] = str(action) if schedule.num_chunks > 1 else f"{action.op.value}{action.microbatch}"
            if action.op is Op.BACKWARD:
                cell[start + 1] = "="
    width = max(len(text) for cell in cells for text in cell)
    label = len(f"rank {len(rows) - 1}")
    return "\n".join(
        f"{f'rank {rank}':<{label}} | "
        + " ".join(("=" * width if text == "=" else text.ljust(width)) for text in cell).rstrip()
        for rank, cell in enumerate(cells)
    )
