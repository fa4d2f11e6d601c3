"""How much memory a rank's saves get: settled once, when it reserves; and what a budget should be. Pure.

With S bytes of state saved per step on each node, and as many ranks elsewhere that count on this one:

- **full**: each step that is kept, and the one that is coming, as it is, at the owner and at each holder; at the
  owner one more for each further step that may be under way, where the budget has the room.
- **lean**: at the owner the newest step and the one that is coming; at each holder the newest one, whose slots the next
  one takes chunk by chunk; each older step, and while the next one comes the newest too, as reverse deltas, a part of
  it (`DELTA_SHARE`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fastcheck_proto.v1 import peer_pb2
from fastcheck_proto.v1 import trainer_pb2 as tpb

#: For a margin beside whole steps.
ROOM = 1.05
#: For slots: a lean copy gives those of the older step back in batches.
SLOTS_BYTES = 64 << 20
#: Of a step's bytes, what its reverse deltas take: AdamW in fp32 measures 0.30 to 0.33. Only for advice.
DELTA_SHARE = 0.35
#: Segments of a lean contract: the newest committed step and the one that is coming.
LEAN_SEGMENTS = 2
#: Jobs that a refusal names.
HOLDINGS_SHOWN_MAX = 3


def whole_bytes(step_bytes: int, *, keep_steps: int) -> int:
    """Below this budget there is no room to keep every step as it is; `step_bytes`: own ones and replicas of a step."""
    return round((keep_steps + 1) * step_bytes * ROOM)


def ample_bytes(state_bytes: int, *, tolerate: int, keep_steps: int) -> int:
    """The same for a node that keeps as much for each of `tolerate` others as it has them keep."""
    return whole_bytes((1 + tolerate) * state_bytes, keep_steps=keep_steps)


def lean_bytes(state_bytes: int, *, tolerate: int, keep_steps: int) -> int:
    """About what is needed at least, if steps encode as those of AdamW do."""
    own_older = keep_steps if keep_steps > 1 else 0
    return (
        round((2 + tolerate + (own_older + tolerate * keep_steps) * DELTA_SHARE) * state_bytes) + SLOTS_BYTES
    )


@dataclass(frozen=True)
class Contract:
    """What is set aside for one rank."""

    lean: bool
    segments: int
    segment_bytes: int

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.segments * self.segment_bytes

    @property
    def kind(self) -> tpb.MemoryContract.ValueType:
        """As it is called on the wire."""
        return tpb.MEMORY_CONTRACT_LEAN if self.lean else tpb.MEMORY_CONTRACT_FULL

    def message(self, offered: int) -> tpb.Reserved:
        """As the trainer is told."""
        return tpb.Reserved(contract=self.kind, segments=self.segments, bytes=self.bytes, offered=offered)

    def report(self, rank: int) -> peer_pb2.RankMemory:
        """As operators are told."""
        return peer_pb2.RankMemory(rank=rank, contract=self.kind, segments=self.segments, bytes=self.bytes)


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What counts against a budget, the node's or one job's, when a rank reserves. All of one step."""

    #: 0: there is none.
    budget_bytes: int
    #: Saved by all ranks that count, this one included.
    own_bytes: int
    #: Set aside for the others of them.
    others_bytes: int
    #: Held for ranks of other nodes, now or soon.
    copies_bytes: int


def settle(demands: Iterable[Demand], segment_bytes: int, *, keep_steps: int, in_flight: int) -> Contract:
    """The contract of a rank: full where every budget has room for it, else lean.

    Args:
        demands: one for each budget.
        in_flight: steps of the rank that may be under way at once.
    """
    segments = keep_steps + in_flight
    for demand in demands:
        if not demand.budget_bytes:
            continue
        step_bytes = demand.own_bytes + demand.copies_bytes
        if demand.budget_bytes < whole_bytes(step_bytes, keep_steps=keep_steps):
            return Contract(lean=True, segments=LEAN_SEGMENTS, segment_bytes=segment_bytes)
        left = demand.budget_bytes / ROOM - demand.others_bytes - (keep_steps + 1) * demand.copies_bytes
        segments = min(segments, int(left // segment_bytes))
    return Contract(lean=False, segments=max(segments, keep_steps + 1), segment_bytes=segment_bytes)


@dataclass(frozen=True)
class Holding:
    """What one job has in a node's memory."""

    job: str
    bytes: int
    #: The parts of it in own ranks' steps that are not committed, and in copies for ranks of other nodes.
    uncommitted_bytes: int = 0
    copy_bytes: int = 0

    def __str__(self) -> str:
        parts = {
            "in steps that are not committed": self.uncommitted_bytes,
            "in copies for other nodes": self.copy_bytes,
        }
        told = ", ".join(f"{size} {where}" for where, size in parts.items() if size)
        return f"job {self.job!r} {self.bytes}" + (f" ({told})" if told else "")


def advice(
    state_bytes: int,
    *,
    tolerate: int,
    keep_steps: int,
    budget_bytes: int,
    holdings: Iterable[Holding],
    job: str = "",
) -> str:
    """For whoever was refused: what the budget should be, the node's or that of one job, and who has the memory.

    Args:
        state_bytes: saved per step by the ranks here that count.
        budget_bytes: as it is now.
        holdings: what the jobs have that count.
        job: only this one counts; empty: all do.
    """
    lean = lean_bytes(state_bytes, tolerate=tolerate, keep_steps=keep_steps)
    ample = ample_bytes(state_bytes, tolerate=tolerate, keep_steps=keep_steps)
    whose, key = (
        (f"job {job!r} on this node", "job_budget_bytes") if job else ("this node", "ram_budget_bytes")
    )
    words = f"the ranks of {whose} save {state_bytes} bytes per step: "
    words += f"with tolerate {tolerate} and keep_steps {keep_steps} {key} "
    third = "where the codec makes steps a third of their size"
    if budget_bytes < lean < ample:
        words += f"should be at least {lean} {third}, and {ample} where it does not"
    elif lean <= budget_bytes < ample:
        words += f"is enough {third}, and should be {ample} where it does not"
    else:
        words += f"should be at least {ample}" if budget_bytes < ample else "is enough for that"
    largest = sorted(holdings, key=lambda h: h.bytes, reverse=True)[:HOLDINGS_SHOWN_MAX]
    return words + "; bytes in use: " + ("; ".join(map(str, largest)) or "none")
