"""Where shards go: members and policy → holders. Pure.

No I/O, no clock, no randomness: every voter and every restart computes the same answer. Who shares whose fate is
bounded by `fastcheck_proto.placement_groups`, and `choose.py` picks holders within that.
"""

from .choose import Plan, PlannedShard, place, plan_shards, substitute

__all__ = ["Plan", "PlannedShard", "place", "plan_shards", "substitute"]
