"""One step of one rank on its way to being committed.

    sealed ──▶ STAGED ──all holders──▶ REPLICATED ──registry──▶ COMMITTED
                 │                     │      │                  ▲
                 └─────(no registry)──▶ PROVISIONAL ─────────────┘
                 └───────── FAILED ◀──────────┘

A save only moves forward; whoever watches it may miss a state but never the last one.
Owned by the event loop's thread, but for `moved()`, which sending threads may call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import trainer_pb2 as tpb

from ..errors import FastCheckdError, InvalidRequestError, ReplicasDisagreeError
from ..rpc import detail
from ..store.segments import Segment
from .content import NOTHING, Content, SharedClaim, of_layout

State: TypeAlias = tpb.SaveState.ValueType
FINAL: tuple[State, ...] = (tpb.SAVE_STATE_COMMITTED, tpb.SAVE_STATE_FAILED)
#: How far each state is along the way. The numbers on the wire say nothing about that.
PROGRESS: dict[State, int] = {
    tpb.SAVE_STATE_UNSPECIFIED: 0,
    tpb.SAVE_STATE_STAGED: 1,
    tpb.SAVE_STATE_REPLICATED: 2,
    tpb.SAVE_STATE_PROVISIONAL: 3,
    tpb.SAVE_STATE_COMMITTED: 4,
    tpb.SAVE_STATE_FAILED: 4,
}


@dataclass(frozen=True)
class SaveKey:
    """Which save: a rank's step in a job."""

    job: str
    rank: int
    step: int

    def __str__(self) -> str:
        return f"step {self.step} of rank {self.rank} of job {self.job}"


@dataclass(eq=False)
class Save:
    """The step's bytes, where it stands, and what it cost so far."""

    key: SaveKey
    save_id: str
    session: int
    world_size: int
    segment: Segment
    #: Payload and header together; at most the segment's size.
    state_bytes: int
    header_offset: int = 0
    header_bytes: int = 0
    #: Its chunks; known from the seal to the end.
    content: Content = NOTHING
    lossy: bool = False
    #: Memory is short: it is to take as little as it can, here and at its holders.
    lean: bool = False
    #: Which part of a state that all ranks hold alike it is, and what this rank found in that state.
    shared: pb.SharedPart | None = None
    shared_digests: tuple[pb.PartDigest, ...] = ()
    #: The step of this rank before it while that is under way: it is sent first, and is then this one's base.
    after: Save | None = None
    #: The registry may have heard that this rank is replicated: from then on the step may be committed.
    reported: bool = False
    #: How often ranks of the job had been taken over when it was placed; 0: not known.
    generation: int = 0
    #: All sessions of the job below it that load were open when this save was begun; 0: not known.
    begun_after: int = 0

    #: By the monotonic clock; never later than the trainer began it.
    begun_at: float = field(default_factory=time.monotonic)
    #: Likewise.
    sealed_at: float = 0.0
    state: State = tpb.SAVE_STATE_UNSPECIFIED
    error: FastCheckdError | None = None
    #: Bytes that went over the network for all acknowledged copies, divided by their number.
    encoded_bytes: int = 0
    #: What each codec did, likewise.
    codecs: list[pb.CodecUse] = field(default_factory=list)
    #: Thread seconds that encoding took.
    encode_s: float = 0.0
    replicate_s: float = 0.0
    commit_s: float = 0.0
    copies: int = 0
    resent_shards: int = 0

    #: Why nothing moves at present (no quorum, no holders); None while things go on.
    stalled_because: FastCheckdError | None = None
    moved_at: float = field(default_factory=time.monotonic)
    #: Oldest step of this rank that is under way here, this one at the latest.
    oldest_step: Callable[[], int] = lambda: 0
    #: Whether it may be reported now: the number of steps whose reports are undecided is bounded.
    may_report: Callable[[], bool] = lambda: True
    #: Steps of this rank that were given up and never reported.
    obsolete: Callable[[], tuple[int, ...]] = lambda: ()
    #: Called when it has become provisional.
    on_provisional: Callable[[Save], None] = lambda _: None
    #: Called after every change; the trainer's session is told by it.
    on_change: Callable[[Save], None] = lambda _: None
    task: asyncio.Task[None] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def done(self) -> bool:
        """Committed or failed."""
        return self.state in FINAL

    @property
    def sent(self) -> bool:
        """All copies are acknowledged, or the save is over."""
        return PROGRESS[self.state] >= PROGRESS[tpb.SAVE_STATE_REPLICATED]

    @property
    def provisional(self) -> bool:
        """Replicated, and nobody there to commit it."""
        return self.state == tpb.SAVE_STATE_PROVISIONAL

    async def describe(self, sealed: tpb.Sealed, chunk_bytes: int) -> None:
        """Take over what the trainer says of its state.

        Raises:
            InvalidRequestError: header, layout or shared part do not fit the state.
        """
        if sealed.header_bytes == 0 or sealed.header_offset + sealed.header_bytes > self.state_bytes:
            raise InvalidRequestError("the state header lies outside of the state")
        claim = SharedClaim.of(sealed, self.state_bytes)
        layout = sealed.layout if sealed.HasField("layout") else None
        # A large model's layout has a million runs.
        content = await asyncio.to_thread(of_layout, layout, self.state_bytes, chunk_bytes)
        self.header_offset, self.header_bytes = sealed.header_offset, sealed.header_bytes
        self.content, self.lossy = content, content.lossy
        self.shared, self.shared_digests = (claim.part, claim.digests) if claim is not None else (None, ())

    def moved(self, _amount: int = 0) -> None:
        """Something went forward: a byte was sent, a call was answered."""
        self.moved_at = time.monotonic()
        self.stalled_because = None

    def stalled(self, why: FastCheckdError) -> None:
        """Nothing can go forward at present."""
        self.stalled_because = why

    def idle_s(self) -> float:
        """Seconds since something went forward."""
        return time.monotonic() - self.moved_at

    def advance(self, state: State, error: FastCheckdError | None = None) -> None:
        """Enter a later state and wake the watchers."""
        assert PROGRESS[state] > PROGRESS[self.state], f"{self.key} cannot go from {self.state} to {state}"
        self.state = state
        self.error = error
        self._wake()
        if self.provisional:
            self.on_provisional(self)

    def reach(self, state: State) -> None:
        """Enter a state unless the save has come that far already."""
        if PROGRESS[state] > PROGRESS[self.state]:
            self.advance(state)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_change(self)

    async def until_done(self) -> None:
        """Return when the save is committed or has failed."""
        while not self.done:
            await self._changed.wait()

    async def until_sent(self) -> None:
        """Return when all copies are acknowledged, or the save is over."""
        while not self.sent:
            await self._changed.wait()

    def report(self) -> tpb.SaveProgress:
        """The save as the trainer sees it."""
        return tpb.SaveProgress(
            session=self.session,
            step=self.key.step,
            state=self.state,
            error=None if self.error is None else detail(self.error),
            encoded_bytes=self.encoded_bytes,
            replicate_s=self.replicate_s,
            commit_s=self.commit_s,
            copies=self.copies,
            resent_shards=self.resent_shards,
            codecs=self.codecs,
            encode_s=self.encode_s,
            lossy=self.lossy,
            disagreements=(self.error.disagreements if isinstance(self.error, ReplicasDisagreeError) else ()),
        )
