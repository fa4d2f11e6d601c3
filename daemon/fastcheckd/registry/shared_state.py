"""Steps whose ranks hold one state and keep a part of it each: do the parts make a whole, do the ranks agree? Pure.

That the parts fit is a rule of the commit, applied by every voter. What the ranks found in the state, a table of
digests each, is compared by the leader alone, before it proposes: it never enters the log. docs/replicated.md says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fastcheck_proto.conventions import RANK_MAX

from .records import Json, MalformedError

#: A digest of a tensor, or of a run of tensors.
ENTRY_BYTES = 8
#: All digests of one rank: repeated once a second while other ranks are waited for.
TABLE_BYTES_MAX = 64 * 1024
DISAGREEMENTS_MAX = 256
_RANKS_NAMED_MAX = 16

#: What one rank found: digests by number of the part.
Tables: TypeAlias = Mapping[int, bytes]


@dataclass(frozen=True)
class Disagreement:
    """An entry of a part on which ranks do not agree; `ranks` are a minority, or else all that compared it."""

    part: int
    entry: int
    ranks: tuple[int, ...]
    minority: bool


def check_tables(tables: Tables) -> None:
    """Raises MalformedError for what no rank following the rules would send."""
    if sum(map(len, tables.values())) > TABLE_BYTES_MAX:
        raise MalformedError(f"a rank's digests of a shared state may have {TABLE_BYTES_MAX} bytes at most")
    if any(part >= RANK_MAX or len(table) % ENTRY_BYTES for part, table in tables.items()):
        raise MalformedError(f"digests of a shared state must be {ENTRY_BYTES} bytes each")


def is_replicated(ranks: Sequence[Json]) -> bool:
    """Whether a step's ranks keep parts of one state."""
    return any("shared" in record for record in ranks)


def parts_differ(ranks: Sequence[Json]) -> tuple[str, list[int]] | None:
    """Why the parts of all ranks, in order, do not make a whole, and which ranks are to blame; None if they do."""
    if not is_replicated(ranks):
        return None
    plain = [record["rank"] for record in ranks if "shared" not in record]
    if plain:
        return (
            f"{_ranks(plain)} saved a state of its own, the others parts of one: pass replicated= alike on all ranks",
            plain,
        )
    layouts = [(record["shared"]["layout"], record["shared"]["bytes"]) for record in ranks]
    usual, count = Counter(layouts).most_common(1)[0]
    if count < len(ranks):
        others = [record["rank"] for record, mine in zip(ranks, layouts, strict=True) if mine != usual]
        named = others if 2 * count > len(ranks) else [record["rank"] for record in ranks]
        return (
            f"names, dtypes, shapes or layout of the tensors differ on {_ranks(named)}: all ranks must build the same "
            "model and optimizer, and name what is their own with per_rank=",
            named,
        )
    at = 0
    for record in ranks:
        if record["shared"]["start"] != at:
            return f"the part of {_ranks([record['rank']])} does not follow the one before it", [
                record["rank"]
            ]
        at = record["shared"]["stop"]
    if at != usual[1]:
        return f"the parts of all ranks end at byte {at} of {usual[1]}", [ranks[-1]["rank"]]
    return None


def disagreements(tables: Mapping[int, Tables]) -> list[Disagreement]:
    """Where ranks that should hold the same found different things: the first of them, in order.

    Args:
        tables: by rank. A part that only one rank looked at is not compared.
    """
    found: list[Disagreement] = []
    for part in sorted({part for table in tables.values() for part in table}):
        by_table: dict[bytes, list[int]] = {}
        for rank, table in sorted(tables.items()):
            if part in table:
                by_table.setdefault(table[part], []).append(rank)
        if len(by_table) > 1:
            found += _in_part(part, by_table, DISAGREEMENTS_MAX - len(found))
        if len(found) >= DISAGREEMENTS_MAX:
            break
    return found


def _in_part(part: int, by_table: Mapping[bytes, list[int]], at_most: int) -> list[Disagreement]:
    found: list[Disagreement] = []
    total = sum(map(len, by_table.values()))
    for at in range(0, max(map(len, by_table)), ENTRY_BYTES):
        if len(found) >= at_most:
            break
        ranks_of: dict[bytes, list[int]] = {}
        for table, ranks in by_table.items():
            ranks_of.setdefault(table[at : at + ENTRY_BYTES], []).extend(ranks)
        if len(ranks_of) > 1:
            most = max(ranks_of.values(), key=len)
            minority = 2 * len(most) > total
            named = [
                rank for ranks in ranks_of.values() if not (minority and ranks is most) for rank in ranks
            ]
            found.append(Disagreement(part, at // ENTRY_BYTES, tuple(sorted(named)), minority))
    return found


def describe(found: Sequence[Disagreement]) -> str:
    """A sentence about the ranks; the tensors' names are known to the trainers alone."""
    minority = sorted({rank for one in found if one.minority for rank in one.ranks})
    unclear = sorted({rank for one in found if not one.minority for rank in one.ranks})
    more = " or more" if len(found) >= DISAGREEMENTS_MAX else ""
    who = []
    if minority:
        who.append(f"{_ranks(minority)} differs from most others")
    if unclear:
        who.append(f"{_ranks(unclear)} differ from each other")
    return (
        f"ranks disagree about a state that all should hold alike, in {len(found)}{more} places: {'; '.join(who)}. "
        "Nothing of this step was committed"
    )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_RANKS_NAMED_MAX]))
    more = f" and {len(ranks) - _RANKS_NAMED_MAX} more" if len(ranks) > _RANKS_NAMED_MAX else ""
    return f"rank {shown}{more}"
