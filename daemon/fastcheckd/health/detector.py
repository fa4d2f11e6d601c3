"""Signs of life and findings, now → who is UP, SUSPECT or DOWN. Pure; times are the arbiter's monotonic clock.

Every voter listens, only the leader judges, and its DOWN is a proposal that the state machine decides.
SUSPECT means "place nothing new there and ask about it"; it costs nothing if it is wrong. DOWN costs copies, so it
needs a majority of the voters that heard nothing, *and* what those found who asked the node directly.

    heartbeat ──► heard ─────────────► UP
    silence, or a broken stream ─────► SUSPECT, in question: a round of questions is due
    the round's reports and findings ► DOWN, or still SUSPECT: then another round

A round stands alone: what an earlier one brought, what is older than `evidence_s`, and what was asked before the
node was heard again, does not count. Silence is only counted while this process was awake to hear: of a gap
between two events it takes at most `_nap_s`, and after a gap longer than `suspect_after_s` it starts anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from fastcheck_proto.v1 import registry_pb2 as rpb

#: A node in one of its lives: node id and incarnation.
Life = tuple[str, int]

#: Returns within this time count.
WINDOW_S = 600.0
#: Two returns are a bad day; the third one is a habit.
FREE_RETURNS = 2
DAMPED_S_MIN = 10.0
DAMPED_S_MAX = 300.0
_RETURNS_MAX = 16

_DATA_REASONS: dict[int, str] = {
    rpb.DATA_HEALTH_STARTING: "DATA_STARTING: its data process has not answered yet",
    rpb.DATA_HEALTH_GONE: "DATA_GONE: its data process has ended and is started again",
    rpb.DATA_HEALTH_HUNG: "DATA_HUNG: its data process is there and makes no progress",
}


class Verdict(Enum):
    """What the leader thinks of a node."""

    UP = "UP"
    SUSPECT = "SUSPECT"
    DOWN = "DOWN"


class Finding(Enum):
    """What somebody found who asked a node directly who it is."""

    ANSWERED = "answered"
    #: Nobody listens there, or another life does: the one asked for is over.
    REFUSED = "refused"
    #: No answer in time: dead, cut off, or busy.
    SILENT = "silent"


@dataclass(frozen=True)
class Judgement:
    """A verdict, and why, for people; the reason of an UP node is empty unless it is damped."""

    verdict: Verdict
    reason: str = ""


@dataclass
class _Round:
    """One round of questions about a life."""

    number: int
    opened_at: float
    #: Who was asked and has not said that it could not ask.
    askers: set[str]
    findings: dict[str, Finding] = field(default_factory=dict)
    #: Other voters' silences in seconds. Each is a fact of its moment: it does not grow.
    silences_s: dict[str, float] = field(default_factory=dict)

    def count(self, *kinds: Finding) -> int:
        return sum(finding in kinds for finding in self.findings.values())


@dataclass
class _Signs:
    #: On the clock that stands still while this process sleeps.
    heard: float
    heard_at: float | None = None
    broken: bool = False
    data: rpb.DataHealth.ValueType = rpb.DATA_HEALTH_OK
    round: _Round | None = None
    #: This voter has told the leader of its silence, or is the leader and has judged: it renews nothing until then.
    withheld_until: float = 0.0


class FailureDetector:
    """Signs of life, and the verdicts they allow.

    Args:
        suspect_after_s: silence before a node is suspected, and the window that a new leader waits.
        down_after_s: silence at a majority after which a node that the askers do not reach is DOWN.
        hush_s: silence that is enough beside refused connections: two heartbeats, by default half of
            `suspect_after_s`, the longest that two heartbeats can take.
        evidence_s: age at which the answers of a round count no more.
    """

    def __init__(
        self,
        *,
        suspect_after_s: float,
        down_after_s: float,
        hush_s: float | None = None,
        evidence_s: float = 1.0,
    ) -> None:
        self._suspect_after_s = suspect_after_s
        self._down_after_s = down_after_s
        self._hush_s = suspect_after_s / 2 if hush_s is None else hush_s
        self._evidence_s = evidence_s
        self._nap_s = suspect_after_s / 2
        self._signs: dict[Life, _Signs] = {}
        self._returns = Returns()
        self._rounds = 0
        self._noticed_at: float | None = None
        #: Seconds for which this process was awake to hear.
        self._listened_s = 0.0
        self._listening_since = 0.0
        self._judging_since = 0.0

    # Every voter

    def awake(self, now: float) -> None:
        """This process runs. To be called each quarter of `suspect_after_s` or oftener; every event counts as well."""
        gap_s = 0.0 if self._noticed_at is None else max(0.0, now - self._noticed_at)
        self._noticed_at = now if self._noticed_at is None else max(now, self._noticed_at)
        self._listened_s += min(gap_s, self._nap_s)
        if gap_s > self._suspect_after_s:
            # Stopped, or starved of CPU: what it did not hear proves nothing.
            self._listening_since = self._judging_since = self._listened_s

    def heard(self, life: Life, now: float, data: rpb.DataHealth.ValueType = rpb.DATA_HEALTH_OK) -> None:
        """A heartbeat, or a registration. All that was found out before is void."""
        self.awake(now)
        signs = self._signs.setdefault(life, _Signs(self._listened_s))
        signs.heard = self._listened_s
        signs.heard_at = now
        signs.data = data
        signs.broken = False
        signs.round = None

    def broke(self, life: Life, now: float) -> None:
        """The stream of heartbeats ended without a word: a killed process, or a lost connection."""
        self.awake(now)
        if life in self._signs:
            self._signs[life].broken = True

    def members(self, lives: Collection[Life], now: float, left: Collection[str] = ()) -> None:
        """The cluster's nodes in their newest lives, DOWN ones too; signs of all others are forgotten.

        `left`: node ids of those that are DOWN because they left in good order.
        """
        self.awake(now)
        self._returns.members(lives, now, left)
        known = set(lives)
        self._signs = {life: signs for life, signs in self._signs.items() if life in known}
        for life in known:
            self._signs.setdefault(life, _Signs(self._listened_s))

    def testify(self, life: Life, now: float, *, silence_s: float, withhold_s: float) -> float | None:
        """What this voter says to the leader: for how long it has heard nothing; None: it cannot tell.

        With a silence of at least `silence_s` it also renews no lease of that life for `withhold_s` from now on.
        """
        silent_s = self.silent_s(life, now)
        if silent_s is not None and silent_s >= silence_s:
            self.withhold(life, now + withhold_s)
        return silent_s

    def silent_s(self, life: Life, now: float) -> float | None:
        """For how long this voter, which was awake, has heard nothing; None: it cannot tell."""
        self.awake(now)
        signs = self._signs.get(life)
        if signs is None or self._listened_s - self._listening_since < self._suspect_after_s:
            return None
        return self._silence_s(signs)

    def withhold(self, life: Life, until: float) -> None:
        """The leader's own silence is part of its verdict: it renews no lease of that life either."""
        if signs := self._signs.get(life):
            signs.withheld_until = max(signs.withheld_until, until)

    def renews(self, life: Life, now: float) -> bool:
        """Whether a heartbeat of this life renews its lease here."""
        signs = self._signs.get(life)
        return signs is None or signs.withheld_until <= now

    # The leader

    def became_leader(self, now: float) -> None:
        """Start judging. Silence counts after one window: heartbeats may have been lost on the way here."""
        self.awake(now)
        self._judging_since = self._listened_s

    def in_question(self) -> list[Life]:
        """Lives about which others should be asked: silent, or with a broken stream."""
        return [life for life, signs in self._signs.items() if self._doubtful(signs)]

    def ask(self, life: Life, askers: Collection[str], now: float) -> int:
        """A round of questions begins; returns its number. `askers` are the node ids of all who are to ask."""
        self.awake(now)
        self._rounds += 1
        if signs := self._signs.get(life):
            signs.round = _Round(self._rounds, now, set(askers))
        return self._rounds

    def reported(self, life: Life, number: int, voter: str, silence_s: float) -> None:
        """Another voter says for how long it has heard nothing."""
        if found := self._round(life, number):
            found.silences_s[voter] = silence_s

    def found(self, life: Life, number: int, asker: str, finding: Finding | None) -> None:
        """An asker's answer; None: it could not be asked, or could not ask."""
        if (found := self._round(life, number)) is None:
            return
        if finding is None:
            found.askers.discard(asker)
        elif asker in found.askers:
            found.findings[asker] = finding

    def judge(self, lives: Collection[Life], voters: int, now: float) -> dict[Life, Judgement]:
        """Judge current lives, with so many voters in the cluster, this one included."""
        self.awake(now)
        for life in lives:
            self._signs.setdefault(life, _Signs(self._listened_s))
        return {life: self._judgement(life, self._signs[life], voters, now) for life in lives}

    # For views

    def damped_s(self, life: Life, now: float) -> float:
        """How much longer the node gets nothing new, because it came back too often; 0: it is not damped."""
        return self._returns.damped_s(life[0], now)

    def data(self, life: Life) -> rpb.DataHealth.ValueType:
        """How the node's data process was at its last heartbeat."""
        return self._signs[life].data if life in self._signs else rpb.DATA_HEALTH_UNSPECIFIED

    def heard_ms_ago(self, life: Life, now: float) -> int | None:
        """Since this voter heard the life last; None: never."""
        signs = self._signs.get(life)
        return None if signs is None or signs.heard_at is None else int(max(0.0, now - signs.heard_at) * 1000)

    # Judging

    def _silence_s(self, signs: _Signs) -> float:
        return self._listened_s - max(signs.heard, self._listening_since)

    def _doubtful(self, signs: _Signs) -> bool:
        return signs.broken or self._silence_s(signs) > self._suspect_after_s

    def _round(self, life: Life, number: int) -> _Round | None:
        signs = self._signs.get(life)
        return signs.round if signs and signs.round and signs.round.number == number else None

    def _judgement(self, life: Life, signs: _Signs, voters: int, now: float) -> Judgement:
        waited = self._listened_s - self._judging_since >= self._suspect_after_s
        # A broken stream is no silence: whoever led before, it broke here.
        if self._doubtful(signs) and (waited or signs.broken):
            if reason := self._why_down(signs, voters, now, waited=waited):
                return Judgement(Verdict.DOWN, reason)
            what = "its stream of heartbeats broke" if signs.broken else "no heartbeat"
            return Judgement(Verdict.SUSPECT, f"SILENT: {what}")
        if signs.data != rpb.DATA_HEALTH_OK:
            return Judgement(Verdict.SUSPECT, _DATA_REASONS.get(signs.data, "its data process is not well"))
        if self.damped_s(life, now):
            count = self._returns.count(life[0])
            return Judgement(Verdict.UP, f"DAMPED: it came back {count} times within ten minutes")
        return Judgement(Verdict.UP)

    def _why_down(self, signs: _Signs, voters: int, now: float, *, waited: bool) -> str:
        """Why the node is DOWN; empty: it is not proved. Without `waited`, silence alone proves nothing."""
        found = signs.round
        if found is None or now - found.opened_at > self._evidence_s or not found.findings:
            return ""
        silences_s = [self._silence_s(signs), *found.silences_s.values()]
        majority, asked = voters // 2 + 1, len(found.askers)

        def silent(for_s: float) -> int:
            return sum(silence_s >= for_s for silence_s in silences_s)

        refused = found.count(Finding.REFUSED)
        if silent(self._hush_s) >= majority and refused * 2 > asked:
            return (
                f"ended: {refused} of {asked} were refused when they asked it, and "
                f"{silent(self._hush_s)} of {voters} voters hear nothing"
            )
        unanswered = found.count(Finding.REFUSED, Finding.SILENT)
        enough = unanswered == asked if asked < 3 else unanswered * 3 >= asked * 2
        if waited and silent(self._down_after_s) >= majority and enough:
            return (
                f"unreachable: {unanswered} of {asked} got no answer, and {silent(self._down_after_s)} of "
                f"{voters} voters have heard nothing for {self._down_after_s:g} s"
            )
        return ""


class Returns:
    """Which nodes come back again and again, and for how long each then gets nothing new. A first life is no return.

    A node that crashes as soon as it gets work would otherwise take copies, lose them, and take the next ones. The
    memory is this voter's own; a new leader has kept its own since it saw the nodes come.
    """

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._at: dict[str, deque[float]] = {}
        self._until: dict[str, float] = {}
        self._left: frozenset[str] = frozenset()

    def members(self, lives: Collection[tuple[str, int]], now: float, left: Collection[str] = ()) -> None:
        """The members now, DOWN ones too: a higher incarnation of a known node is a return, others are forgotten.

        Who comes back after it had `left` in good order was restarted by somebody: that is no return.
        """
        for node_id, incarnation in lives:
            if incarnation > self._newest.get(node_id, incarnation) and node_id not in self._left:
                self._returned(node_id, now)
        self._left = frozenset(left)
        self._newest = dict(lives)
        self._at = {node_id: at for node_id, at in self._at.items() if node_id in self._newest}
        self._until = {n: until for n, until in self._until.items() if n in self._newest and until > now}

    def _returned(self, node_id: str, now: float) -> None:
        at = self._at.setdefault(node_id, deque(maxlen=_RETURNS_MAX))
        at.append(now)
        while now - at[0] > WINDOW_S:
            at.popleft()
        if (beyond := len(at) - FREE_RETURNS) > 0:
            until = now + min(DAMPED_S_MIN * 2 ** (beyond - 1), DAMPED_S_MAX)
            self._until[node_id] = max(until, self._until.get(node_id, until))

    def damped_s(self, node_id: str, now: float) -> float:
        """How much longer the node gets nothing new; 0: it is not damped."""
        return min(max(0.0, self._until.get(node_id, now) - now), DAMPED_S_MAX)

    def count(self, node_id: str) -> int:
        """Returns that still count."""
        return len(self._at.get(node_id, ()))
