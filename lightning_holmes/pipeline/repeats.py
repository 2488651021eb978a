"""Which of the repeats of a measurement count.

undisturbed([0.2, 0.3, 0.25, 0.9, 0.21])          # [0, 2, 4]
"""

import math
import statistics
from collections.abc import Sequence

_BLOCK_S = 0.15  # of repeats, to last over several periods in which a share of a core is assigned
_DISTURBED = 1.5  # repeats that took so many times the middle one are left out


def undisturbed(seconds: Sequence[float]) -> list[int]:
    """Which of some repeats, by their seconds, count: what else runs on the machine only adds.

    A host with a share of a core stops and goes, and its pauses are part of its speed. So repeats are put together, in
    their order, until they last over several periods of the share, and the quicker half of these blocks counts. Where all
    together are shorter than that, those do that took no more than 1.5 times the middle one.
    """
    blocks: list[list[int]] = [[]]
    for index in range(len(seconds)):
        if math.fsum(seconds[i] for i in blocks[-1]) >= _BLOCK_S:
            blocks.append([])
        blocks[-1].append(index)
    if len(blocks) > 1 and math.fsum(seconds[i] for i in blocks[-1]) < _BLOCK_S:
        blocks.pop()
    if len(blocks) == 1:
        limit = _DISTURBED * statistics.median_low(seconds)
        return [index for index, taken in enumerate(seconds) if taken <= limit]
    means = [statistics.fmean(seconds[i] for i in block) for block in blocks]
    limit = statistics.median_low(means)
    return [index for block, mean in zip(blocks, means, strict=True) for index in block if mean <= limit]
