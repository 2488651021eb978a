"""Select which repeats of a measurement count.

undisturbed([0.2, 0.3, 0.25, 0.9, 0.21])          # [0, 2, 4]
"""

import math
import statistics
from collections.abc import Sequence

_BLOCK_S = 0.15  # least duration of a block of repeats: several scheduling periods of a share of a core
_DISTURBED = 1.5  # repeats that took more than this many times the median are left out


def undisturbed(seconds: Sequence[float]) -> list[int]:
    """Return the indices of the repeats that count, from the seconds of each: other work on the machine only adds time.

    A host with a share of a core runs with pauses, and these are part of its speed. So consecutive repeats are
    grouped into blocks that last over several scheduling periods of the share, and the faster half of the blocks
    counts. If there is only one block, the repeats count that took at most 1.5 times the median.
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
