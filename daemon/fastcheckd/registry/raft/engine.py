"""pysyncobj's SyncObj with our log, our snapshots, our connections, and membership that goes by the log.

What pysyncobj 0.3.17 does otherwise, and is overridden here by its private names:

- A follower deletes its log from where an append begins, without comparing. An append that comes twice or late cuts
  entries that match and that the leader counts on: with the leader lost before they are sent again, a committed
  command is gone. Here entries that match in index and term stay; only from the first that differs on are they deleted.
- A snapshot replaces whatever a voter has, also newer entries; and how far a follower's log matches the leader's is
  taken from its end. Here a snapshot that brings nothing new changes nothing, and only what was compared counts.
- An answer to an append names no term. One that is late counts for another leadership of the same voter. And each has
  everything that is under way sent again.
- It forgets changes of the membership that are in the log and not yet committed when it starts, changes the membership
  a second time when an old entry is applied anew, and lets a second change begin before the first is committed.
- After an error of the disk its tick ends half-way, each time after the heartbeats: a leader with a full disk leads on
  and decides nothing. Here a voter whose log cannot be written does nothing at all (`halted`).
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from itertools import dropwhile
from typing import Any

import pysyncobj.syncobj
from pysyncobj import SyncObj
from pysyncobj.monotonic import monotonic
from pysyncobj.syncobj import _COMMAND_TYPE, _RAFT_STATE

from ...config import Voter
from ...log import Complaints
from . import messages
from .journal import Entry, Journal
from .membership import Change
from .messages import Seal
from .snapshots import Snapshot, Snapshots
from .tls import Tls
from .transport import GuardedTransport, VoterNode

logger = logging.getLogger(__name__)

#: Longer than any process lives: a voter that joins waits to be found by the leader.
NEVER_S = 1e9
#: Once the leader's connection has broken, the first of the others stands for election after this long, unless
#: the leader is heard again: one that lives is connected to anew at once, and speaks every 0.1 s.
BROKEN_OFF_S = 0.15
#: The others follow one after the other, far enough apart that each one's votes are in before the next stands.
TURN_S = 0.15
#: Two voters that see different memberships may believe that it is their turn at once.
JITTER_S = 0.04

_complaints = Complaints(logger, "registry")


class _Bounded(logging.Filter):
    """Lets pysyncobj say the same thing a few times per period: it says it at every tick, or for every entry."""

    def __init__(self) -> None:
        super().__init__()
        #: By the line of pysyncobj that says it.
        self._about: dict[int, Complaints] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.lineno not in self._about:
            self._about[record.lineno] = Complaints(logger, "registry engine", record.levelno)
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {record.exc_info[1]!r}"
        self._about[record.lineno].add("%s", text)
        return False


# Those of its modules that log and that are in use.
for _name in ("syncobj", "dns_resolver"):
    logging.getLogger(f"pysyncobj.{_name}").addFilter(_Bounded())


def change_in(command: bytes) -> Change | None:
    """The change of the membership that an entry of the log is, if it is one."""
    if command[:1] != bytes([_COMMAND_TYPE.MEMBERSHIP]):
        return None
    return Change.from_request(messages.loads(command[1:]))


def to_entry(change: Change) -> bytes:
    """A change of the membership as an entry of the log has it; the inverse of `change_in`."""
    return bytes([_COMMAND_TYPE.MEMBERSHIP]) + messages.dumps(change.to_request())


class Engine(SyncObj):  # type: ignore[misc]  # pysyncobj has no types
    """Does nothing at all once `halted` is set. Whoever makes it calls `doTick`, from one thread.

    Args:
        own: this voter.
        others: the other voters according to the log.
        protection: what connections are made safe with.
        begins: the snapshot that the log begins with, whose state is the consumers' already; None: there is none.
        joining: it does not stand for election, until it finds itself added in its log.
        halted: set when the log cannot be written any more.
        on_applied: called when a change of the membership is committed.
        on_snapshot: given all of a snapshot that the leader has sent; has it on disk and its state in use when it
            returns. Raises OSError or ValueError, and then nothing has changed.
        on_contradiction: told why this voter can't go on: what was committed here and the leader's log differ.
    """

    def __init__(
        self,
        own: Voter,
        others: list[Voter],
        protection: Seal | Tls,
        journal: Journal,
        snapshots: Snapshots,
        *,
        begins: Snapshot | None,
        joining: bool,
        halted: threading.Event,
        on_applied: Callable[[Change], None],
        on_snapshot: Callable[[bytes], Snapshot],
        on_contradiction: Callable[[str], None],
        **kwargs: Any,
    ) -> None:
        self._protection = protection
        self._halted = halted
        self.journal = journal
        self._snapshots = snapshots
        self.joining = joining
        self._own = own
        self._on_applied = on_applied
        self._on_snapshot = on_snapshot
        self._on_contradiction = on_contradiction
        self._voted_for_us: tuple[int, set[VoterNode]] = (0, set())
        #: According to the log, committed or not. Replaced, never changed: other threads read it.
        self.voters: tuple[Voter, ...] = (own, *others)
        # Made by these names, at once.
        pysyncobj.syncobj.createJournal = lambda _path: journal
        pysyncobj.syncobj.Serializer = lambda *_: snapshots
        self._SyncObj__raftCommitIndex: int
        self._SyncObj__raftLeader: VoterNode | None
        super().__init__(
            VoterNode(own),
            [VoterNode(voter) for voter in others],
            nodeClass=VoterNode,
            transportClass=GuardedTransport,
            **kwargs,
        )
        if begins is not None:
            self._SyncObj__raftLastApplied = begins.last[1]
            self._SyncObj__raftCommitIndex = max(self._SyncObj__raftCommitIndex, begins.last[1])

    def _onTick(self, timeToWait: float = 0.0) -> None:  # noqa: N802, N803  pysyncobj's spelling
        if not self._halted.is_set():
            super()._onTick(timeToWait)

    def events(self) -> None:
        """Take what has arrived, without waiting."""
        if not self._halted.is_set():
            self._poller.poll(0)

    @property
    def encryptor(self) -> Seal | None:
        """What connections take their seals from; None with TLS."""
        return self._protection if isinstance(self._protection, Seal) else None

    @property
    def tls(self) -> Tls | None:
        """What connections take their certificates from; None with a shared key."""
        return self._protection if isinstance(self._protection, Tls) else None

    # Messages

    def _SyncObj__onMessageReceived(self, node: Any, message: Any) -> None:  # noqa: N802
        if self._halted.is_set():
            return
        kind, term = message["type"], self._SyncObj__raftCurrentTerm
        if kind == "append_entries":
            if message["term"] >= term:
                self._hear_leader(node, message)
            return
        if kind == "next_node_idx":
            # Another term: an answer to what this voter said when it led before. Earlier versions name none.
            if self._SyncObj__raftState == _RAFT_STATE.LEADER and message.get("term", term) == term:
                self._hear_follower(node, message["next_node_idx"], message["reset"], message["success"])
            return
        if kind == "response_vote":
            if self._voted_for_us[0] != term:
                self._voted_for_us = term, set()
            if message["term"] != term or node in self._voted_for_us[1]:
                return
            self._voted_for_us[1].add(node)
        super()._SyncObj__onMessageReceived(node, message)

    def _hear_follower(self, node: Any, following: int, reset: bool, success: bool) -> None:
        """An answer to an append: which entry that voter wants next, and whether it has all before."""
        if node not in self._SyncObj__raftNextIndex:
            return  # it was removed
        self._SyncObj__lastResponseTime[node] = monotonic()
        if reset:
            self._SyncObj__raftNextIndex[node] = min(following, self.journal[-1][1] + 1)
        if success:
            self._SyncObj__raftMatchIndex[node] = max(self._SyncObj__raftMatchIndex[node], following - 1)
            self._SyncObj__raftNextIndex[node] = max(self._SyncObj__raftNextIndex[node], following)

    def _hear_leader(self, node: Any, message: Any) -> None:
        """An append of the leader, of this term or a newer one: entries, a piece of a snapshot, or its word alone."""
        term = message["term"]
        if term == self._SyncObj__raftCurrentTerm and self._SyncObj__raftState == _RAFT_STATE.LEADER:
            self._contradicted(f"{node.id} leads in term {term}, in which this voter was elected")
            return
        self._SyncObj__raftElectionDeadline = monotonic() + self._SyncObj__generateRaftTimeout()
        if self._SyncObj__raftLeader != node:
            self._SyncObj__onLeaderChanged()
        self._SyncObj__raftLeader = node
        if term > self._SyncObj__raftCurrentTerm:
            self._SyncObj__setCurrentTerm(term, None)
        self._SyncObj__setState(_RAFT_STATE.FOLLOWER)
        self._SyncObj__leaderCommitIndex = message["commit_index"]
        matched = (
            self._take_entries(node, message) if "prevLogIdx" in message else self._take_piece(node, message)
        )
        if matched is None:
            return
        # What lies behind may be another leader's, which this one has not compared.
        committed = min(message["commit_index"], matched)
        if committed > self._SyncObj__raftCommitIndex:
            self._SyncObj__raftCommitIndex = committed
            self.journal.setRaftCommitIndex(committed)
        self._SyncObj__sendNextNodeIdx(node, nextNodeIdx=matched + 1, success=True)

    def _take_entries(self, node: Any, message: Any) -> int | None:
        """Have the leader's entries in the log; the index up to which it is the leader's then. None: not known yet."""
        before, before_term = message["prevLogIdx"], message["prevLogTerm"]
        entries = [(bytes(command), index, term) for command, index, term in message.get("entries", ())]
        if "transmission" in message or any(e[1] != before + n for n, e in enumerate(entries, 1)):
            _complaints.add("%s sent entries that do not follow one by one: not taken", node.id)
            return None
        log, first = self.journal, self.journal[0][1]
        if before is None or not first <= before < first + len(log):
            self._SyncObj__sendNextNodeIdx(node, reset=True)
            return None
        if log[before - first][2] != before_term:
            if before <= self._SyncObj__raftCommitIndex:
                self._contradicted(f"entry {before} was committed here, and {node.id} has another one")
                return None
            self._SyncObj__sendNextNodeIdx(node, nextNodeIdx=before, reset=True)
            return None
        new = list(dropwhile(self._has, entries))
        if new and new[0][1] < first + len(log):
            if new[0][1] <= self._SyncObj__raftCommitIndex:
                self._contradicted(f"entry {new[0][1]} was committed here, and {node.id} has another one")
                return None
            self._cut(new[0][1] - first)
        for entry in new:
            log.add(*entry)
        for entry in new:
            if (request := self._SyncObj__parseChangeClusterRequest(entry[0])) is not None:
                self._SyncObj__doChangeCluster(request)
        return int(entries[-1][1] if entries else before)

    def _has(self, entry: Entry) -> bool:
        at = entry[1] - self.journal[0][1]
        return at < len(self.journal) and self.journal[at][2] == entry[2]

    def _cut(self, at: int) -> None:
        """Delete from a position on, and undo the changes of the membership there."""
        for entry in reversed(self.journal[at:]):
            if (request := self._SyncObj__parseChangeClusterRequest(entry[0])) is not None:
                self._SyncObj__doChangeCluster(request, reverse=True)
        self.journal.deleteEntriesFrom(at)

    def _take_piece(self, node: Any, message: Any) -> int | None:
        """Take a piece of the leader's snapshot; like `_take_entries`."""
        whole = self._snapshots.received(message.get("serialized"))
        if whole is None:
            # That this voter is there: receiving may take longer than a leader leads without an answer.
            self._SyncObj__sendNextNodeIdx(node)
            return None
        try:
            found = self._on_snapshot(whole)
        except (ValueError, KeyError, TypeError) as error:
            _complaints.add(
                "%s sent a registry snapshot that cannot be used, it is asked again: %s", node.id, error
            )
            self._SyncObj__sendNextNodeIdx(node, reset=True)
            return None
        return found.last[1]

    def knows(self, last: Entry) -> bool:
        """Whether this voter has all that a snapshot up to this entry holds."""
        index = last[1]
        return index <= self._SyncObj__raftLastApplied or (index >= self.journal[0][1] and self._has(last))

    def go_on_from(self, found: Snapshot, voters: list[Voter]) -> None:
        """Take a snapshot, which is on disk and whose state is in use, in the place of the log."""
        self.journal.begin_with(found.before, found.last)
        self._SyncObj__raftLastApplied = found.last[1]
        self._SyncObj__raftCommitIndex = found.last[1]
        self.journal.setRaftCommitIndex(found.last[1])
        self._SyncObj__updateClusterConfiguration(
            [VoterNode(voter) for voter in voters if voter != self._own]
        )

    def _contradicted(self, what: str) -> None:
        self._on_contradiction(f"{what}: one of the two has lost what it acknowledged")

    def _SyncObj__sendNextNodeIdx(  # noqa: N802
        self,
        node: Any,
        reset: bool = False,
        nextNodeIdx: int | None = None,  # noqa: N803
        success: bool = False,
    ) -> None:
        following = self.journal[-1][1] + 1 if nextNodeIdx is None else nextNodeIdx
        self._SyncObj__transport.send(
            node,
            {
                "type": "next_node_idx",
                "next_node_idx": following,
                "reset": reset,
                "success": success,
                "term": self._SyncObj__raftCurrentTerm,
            },
        )

    def _SyncObj__tryLogCompaction(self) -> None:  # noqa: N802
        if not self._snapshots.resting:
            super()._SyncObj__tryLogCompaction()

    # Membership

    def change(self, change: Change, callback: Callable[[Any, int], None]) -> None:
        """Append a change to the log, if this voter leads and no other change is under way."""
        command = messages.dumps(change.to_request())
        self._applyCommand(command, callback, _COMMAND_TYPE.MEMBERSHIP)

    def healthy(self, within_s: float) -> list[str]:
        """Raft addresses of the voters that have answered this leader lately, itself included."""
        since = monotonic() - within_s
        heard, matched = self._SyncObj__lastResponseTime, self._SyncObj__raftMatchIndex
        others = [VoterNode(voter) for voter in self.voters if voter != self._own]
        # A new leader notes everyone as heard just now; only an answer says what they have.
        answered = [node.id for node in others if heard.get(node, 0.0) > since and matched.get(node, 0)]
        return [self._own.raft_address, *answered]

    def has_caught_up(self, voter: Voter) -> bool:
        """Whether a voter is known to have all that is committed; at the leader."""
        return bool(self._SyncObj__raftMatchIndex.get(VoterNode(voter), 0) >= self.raftCommitIndex)

    def _SyncObj__changeCluster(self, request: Any) -> bool:  # noqa: N802
        if any(change_in(entry[0]) for entry in self._uncommitted()):
            return False
        return bool(super()._SyncObj__changeCluster(request))

    def _uncommitted(self) -> list[Any]:
        first = self.journal[0][1]
        return self.journal[max(0, self.raftLastApplied + 1 - first) :]

    def _SyncObj__doChangeCluster(self, request: Any, reverse: bool = False) -> bool:  # noqa: N802
        changed = bool(super()._SyncObj__doChangeCluster(request, reverse))
        self._list_voters()
        return changed

    def _SyncObj__updateClusterConfiguration(self, nodes: Any) -> None:  # noqa: N802
        super()._SyncObj__updateClusterConfiguration(nodes)
        self._list_voters()

    def _list_voters(self) -> None:
        self.voters = (self._own, *(node.voter for node in self._SyncObj__otherNodes))

    def _SyncObj__doApplyCommand(self, command: bytes) -> Any:  # noqa: N802
        change = change_in(command)
        if change is None:
            return super()._SyncObj__doApplyCommand(command)
        # The membership was changed when the entry came into the log.
        self._on_applied(change)
        if change.kind == "add" and change.voter == self._own:
            self.may_stand()
        return None

    def may_stand(self) -> None:
        """From now on this voter is one like the others."""
        if self.joining:
            self.joining = False
            self._SyncObj__raftElectionDeadline = monotonic() + self._SyncObj__generateRaftTimeout()

    # The leader's end

    def _SyncObj__onNodeDisconnected(self, node: Any) -> None:  # noqa: N802
        """A process that ends closes its connections: need not be waited for like one that is silent.

        Election timeouts stay as long as pauses and lost packets ask for; this shortens only the one that runs.
        """
        super()._SyncObj__onNodeDisconnected(node)
        if node != self._getLeader() or self._SyncObj__raftState != _RAFT_STATE.FOLLOWER or self.joining:
            return
        followers = sorted(v.raft_address for v in self.voters if v.raft_address != node.id)
        wait_s = BROKEN_OFF_S + TURN_S * followers.index(self._own.raft_address) + random.uniform(0, JITTER_S)  # noqa: S311  no secret
        self._SyncObj__raftLeader = None
        self._SyncObj__raftElectionDeadline = min(self._SyncObj__raftElectionDeadline, monotonic() + wait_s)

    def _SyncObj__generateRaftTimeout(self) -> float:  # noqa: N802
        return NEVER_S if self.joining else float(super()._SyncObj__generateRaftTimeout())
