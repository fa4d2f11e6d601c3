"""Raft's own properties, checked at every change of a log, election, acknowledgement, commit and applied entry.

Written from the paper (Ongaro, Ousterhout: In Search of an Understandable Consensus Algorithm, figure 3), not from the
engine. An entry is known by its chain: itself, its term and all that came before it, as one number.

    election safety        a term has one leader at most
    log matching           two logs with an entry of the same index and term have the same entries up to it
    leader completeness    what was committed in a term is in the logs of the leaders of all later ones
    state machine safety   no two voters apply different entries at one index
    durability             what is acknowledged is on that voter's disk, and stays in its log for as long as that leader
                           leads, who never takes anything back; what is committed is on the disks of a majority
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Entry = tuple[bytes, int, int]
Check = Callable[[bool, str, str], None]


class Log:
    """What a voter's log holds, as of its last change; it outlives the voter's process, as its disk does."""

    def __init__(self, consensus: Consensus, name: str) -> None:
        self._consensus = consensus
        self.name = name
        self.first = 1
        self.chains: list[int] = []
        #: Entries up to this index are on disk.
        self.synced = 0
        #: A leader's term, and up to which entry this log was said to be that leader's.
        self.promised = (0, 0)

    @property
    def last(self) -> int:
        return self.first + len(self.chains) - 1

    def at(self, index: int) -> int | None:
        """The chain up to an entry; None: it is not in the log."""
        return self.chains[index - self.first] if self.first <= index <= self.last else None

    def has_on_disk(self, index: int, chain: int) -> bool:
        """Whether a power cut would leave an entry, or a snapshot that it is in."""
        return index < self.first or (index <= self.synced and self.at(index) == chain)

    def opened(self, entries: Sequence[Entry], synced: int) -> None:
        """The log begins with other entries, or ends with others."""
        if entries and self.chains and entries[0][1] == self.first and len(entries) <= len(self.chains):
            last = entries[-1]
            if self._consensus.chain_of.get((last[1], last[2])) == self.chains[len(entries) - 1]:
                del self.chains[len(entries) :]  # only its end was cut off
                self.synced = synced
                return
        self.chains = []
        self.first = entries[0][1] if entries else 1
        for command, index, term in entries:
            self.added(index, term, command)
        self.synced = synced

    def cut(self, entries: Sequence[Entry], synced: int, term: int) -> None:
        """A leader's append has its end deleted, and other entries follow."""
        last = entries[-1][1] if entries else 0
        self._consensus.cuts += 1
        self._consensus.check(
            self.promised[0] != term or last >= self.promised[1],
            "durability",
            f"{self.name} deletes entries from {last + 1} on; the leader of term {term} counts on {self.promised[1]}",
        )
        self.opened(entries, synced)

    def added(self, index: int, term: int, command: bytes) -> None:
        if not self.chains:
            self.first = index
        self._consensus.check(
            index == self.last + 1, "log matching", f"{self.name} puts entry {index} after {self.last}"
        )
        before = self.chains[-1] if self.chains else None
        self.chains.append(self._consensus.chain(before, index, term, command, self.name))


class Consensus:
    """All voters of a run.

    Args:
        voters: how many.
        check: told what holds or does not, whose property it is, and what happened.
    """

    def __init__(self, voters: int, check: Check) -> None:
        self._majority = voters // 2 + 1
        self._check = check
        self._logs: dict[str, Log] = {}
        self._known: dict[tuple[int | None, int, bytes], int] = {}
        #: Chain by index and term.
        self.chain_of: dict[tuple[int, int], int] = {}
        self._leaders: dict[int, str] = {}
        #: Chain by index, of what is committed; and how far it was by the end of each term.
        self._committed: dict[int, int] = {}
        self._reached: dict[int, int] = {}
        #: Elections won, ends of logs that another leader's took the place of, snapshots taken over from a leader, and
        #: voters that ended since their disk was full.
        self.elections = self.cuts = self.snapshots = self.full_disks = 0

    def check(self, ok: bool, what: str, happened: str) -> None:
        self._check(ok, what, happened)

    def log_of(self, name: str) -> Log:
        if name not in self._logs:
            self._logs[name] = Log(self, name)
        return self._logs[name]

    def chain(self, before: int | None, index: int, term: int, command: bytes, name: str) -> int:
        known = self.chain_of.get((index, term))
        if before is None and known is not None:
            # The first entry of a log: what came before it is in a snapshot.
            return known
        key = (before, term, command)
        number = self._known.setdefault(key, len(self._known))
        self.check(
            known in (None, number),
            "log matching",
            f"{name} has another entry {index} of term {term}, or before it",
        )
        if known is None:
            self.chain_of[(index, term)] = number
        return number

    def elected(self, term: int, log: Log) -> None:
        self.elections += 1
        other = self._leaders.setdefault(term, log.name)
        self.check(other == log.name, "election safety", f"{log.name} and {other} both lead in term {term}")
        index = max((reached for earlier, reached in self._reached.items() if earlier < term), default=0)
        if index:
            self.check(
                log.at(index) == self._committed[index],
                "leader completeness",
                f"{log.name} leads in term {term} without the committed entry {index}: {log.first} to {log.last}",
            )

    def acknowledged(self, log: Log, index: int, first: int, term: int) -> None:
        log.promised = term, max(index, log.promised[1] if log.promised[0] == term else 0)
        self.check(
            index <= max(log.synced, first), "durability",
            f"{log.name} acknowledges entry {index}, and has {log.synced} on its disk",
        )  # fmt: skip

    def applied(self, log: Log, index: int, leads_in: int | None) -> None:
        """A voter applies an entry; a leader does so first of all."""
        chain = log.at(index)
        if chain is None:
            self.check(
                False, "state machine safety", f"{log.name} applies entry {index}, which it does not have"
            )
            return
        known = self._committed.setdefault(index, chain)
        self.check(known == chain, "state machine safety", f"{log.name} applies another entry {index}")
        if leads_in is not None and self._reached.get(leads_in, 0) < index:
            have = [each.name for each in self._logs.values() if each.has_on_disk(index, chain)]
            self.check(
                len(have) >= self._majority,
                "durability",
                f"{log.name} applies entry {index}, on the disks of {have}",
            )
            self._reached[leads_in] = index
