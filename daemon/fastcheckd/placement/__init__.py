"""Where shards go, and what that is worth: members and policy → holders, holders → odds. Pure.

No I/O, no clock, no randomness: every voter and every restart computes the same answer. `groups.py` bounds
who shares whose fate, `choose.py` picks holders within that, `odds.py` says what k losses at once do to it.
"""

from .choose import Plan, PlannedShard, place, plan_shards, substitute
from .groups import Groups

__all__ = ["Groups", "Plan", "PlannedShard", "place", "plan_shards", "substitute"]
