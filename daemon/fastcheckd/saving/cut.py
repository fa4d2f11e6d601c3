"""Where a rank's state is cut into shards. Pure.

The registry says how many shards there are and who holds them; only the owner knows which bytes must stay
together. It cuts at chunk ends, so that the parts of a unit never part. Equal chunks are cut alike, step after
step: a shard can be encoded against the one before only if it is the same stretch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise


def cut(lengths: Sequence[int], count: int) -> tuple[range, ...]:
    """The chunks of each shard: `count` stretches, ended at the chunk ends nearest to an even split.

    Args:
        lengths: size of each chunk in bytes, at least one, all above 0.
        count: shards wanted, above 0; with fewer chunks than that there are as many shards as chunks.

    No stretch is empty. Of two ends equally near the earlier one is taken.
    """
    ends = list(accumulate(lengths))
    count = min(count, len(ends))
    cuts = [0]
    for number in range(1, count):
        target = ends[-1] * number / count
        behind = bisect_left(ends, target)  # the first end at or behind the target
        before = behind - 1
        nearest = before if before >= 0 and target - ends[before] <= ends[behind] - target else behind
        # At least one chunk for this shard, and one for each that follows.
        cuts.append(min(max(nearest + 1, cuts[-1] + 1), len(ends) - (count - number)))
    return tuple(range(start, stop) for start, stop in pairwise([*cuts, len(ends)]))
