"""pysyncobj's SyncObj with our journal, our connections, and membership that goes by the log.

What pysyncobj 0.3.17 does otherwise, and is overridden here by its private names: it forgets changes of the
membership that are in the log and not yet committed when it starts, changes the membership a second time
when an old entry is applied anew, and lets a second change begin before the first is committed.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

from pysyncobj import SyncObj
from pysyncobj.monotonic import monotonic
from pysyncobj.syncobj import _COMMAND_TYPE, _RAFT_STATE

from ..config import Voter
from . import unpickling
from .journal import Journal
from .membership import Change
from .raft_transport import GuardedTransport, VoterNode
from .sealing import Seal
from .tls import Tls

#: Longer than any process lives: a voter that joins waits to be found by the leader.
NEVER_S = 1e9
#: Once the leader's connection has broken, the first of the others stands for election after this long, unless
#: the leader is heard again: one that lives is connected to anew at once, and speaks every 0.1 s.
BROKEN_OFF_S = 0.15
#: The others follow one after the other, far enough apart that each one's votes are in before the next stands.
TURN_S = 0.15
#: Two voters that see different memberships may believe that it is their turn at once.
JITTER_S = 0.04


def change_in(command: bytes) -> Change | None:
    """The change of the membership that an entry of the log is, if it is one."""
    if command[:1] != bytes([_COMMAND_TYPE.MEMBERSHIP]):
        return None
    return Change.from_request(unpickling.loads(command[1:]))


class Engine(SyncObj):  # type: ignore[misc]  # pysyncobj has no types
    """Does nothing at all once `halted` is set.

    Args:
        own: this voter.
        others: the other voters according to the log.
        protection: what connections are made safe with.
        joining: it does not stand for election, until it finds itself added in its log.
        on_applied: called in the engine's thread when a change of the membership is committed.
    """

    def __init__(
        self,
        own: Voter,
        others: list[Voter],
        protection: Seal | Tls,
        journal: Journal,
        halted: threading.Event,
        *,
        joining: bool,
        on_applied: Callable[[Change], None],
        **kwargs: Any,
    ) -> None:
        self._protection = protection
        self._halted = halted
        self.journal = journal
        self.joining = joining
        self._own = own
        self._on_applied = on_applied
        #: According to the log, committed or not. Replaced, never changed: other threads read it.
        self.voters: tuple[Voter, ...] = (own, *others)
        super().__init__(
            VoterNode(own),
            [VoterNode(voter) for voter in others],
            nodeClass=VoterNode,
            transportClass=GuardedTransport,
            **kwargs,
        )

    def _onTick(self, timeToWait: float = 0.0) -> None:  # noqa: N802, N803  pysyncobj's spelling
        if self._halted.is_set():
            # After an error halfway through a tick it would go on with what is not on disk.
            time.sleep(timeToWait)
        else:
            super()._onTick(timeToWait)

    @property
    def encryptor(self) -> Seal | None:
        """What connections take their seals from; None with TLS."""
        return self._protection if isinstance(self._protection, Seal) else None

    @property
    def tls(self) -> Tls | None:
        """What connections take their certificates from; None with a shared key."""
        return self._protection if isinstance(self._protection, Tls) else None

    @property
    def listening(self) -> bool:
        """Whether the raft port is ours."""
        return bool(self._SyncObj__transport.ready)

    # Membership

    def change(self, change: Change, callback: Callable[[Any, int], None]) -> None:
        """Append a change to the log, if this voter leads and no other change is under way."""
        command = unpickling.dumps(change.to_request())
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
