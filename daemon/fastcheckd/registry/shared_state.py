"""Steps whose ranks hold one state and keep a part of it each: do the parts make a whole, do the ranks agree? Pure.

That the parts fit is a rule of the commit, applied by every voter. What the ranks found in the state, a digest of each
part, is compared by the leader alone, before it proposes: it never enters the log. docs/replicated.md says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from fastcheck_proto.conventions import RANK_MAX
from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb

from .model import MalformedError

#: Of what a rank found in one part.
DIGEST_BYTES = 16
#: Digests of one rank, repeated once a second while other ranks are waited for.
PARTS_MAX = 4096
_NAMED_MAX = 16

#: What one rank found: a digest by number of the part.
Digests: TypeAlias = Mapping[int, bytes]


def check_digests(digests: Digests) -> None:
    """Raises MalformedError for what no rank following the rules would send."""
    if len(digests) > PARTS_MAX or any(part >= RANK_MAX for part in digests):
        raise MalformedError(f"a rank has digests of at most {PARTS_MAX} parts")
    if any(len(digest) != DIGEST_BYTES for digest in digests.values()):
        raise MalformedError(f"the digest of a part has {DIGEST_BYTES} bytes")


def is_replicated(ranks: Sequence[rpb.RankRecord]) -> bool:
    """Whether a step's ranks keep parts of one state."""
    return any(record.HasField("shared") for record in ranks)


def parts_differ(ranks: Sequence[rpb.RankRecord]) -> tuple[str, list[int]] | None:
    """Why the parts of all ranks, in order, do not make a whole, and which ranks are to blame; None if they do."""
    if not is_replicated(ranks):
        return None
    plain = [record.rank for record in ranks if not record.HasField("shared")]
    if plain:
        return (
            f"{_ranks(plain)} saved a state of its own, the others parts of one: pass replicated= alike on all ranks",
            plain,
        )
    layouts = [(record.shared.layout_digest, record.shared.shared_bytes) for record in ranks]
    usual, count = Counter(layouts).most_common(1)[0]
    if count < len(ranks):
        others = [record.rank for record, mine in zip(ranks, layouts, strict=True) if mine != usual]
        named = others if 2 * count > len(ranks) else [record.rank for record in ranks]
        return (
            f"names, dtypes, shapes or layout of the tensors differ on {_ranks(named)}: all ranks must build the same "
            "model and optimizer, and name what is their own with per_rank=",
            named,
        )
    at = 0
    for record in ranks:
        if record.shared.start != at:
            return f"the part of {_ranks([record.rank])} does not follow the one before it", [record.rank]
        at = record.shared.stop
    if at != usual[1]:
        return f"the parts of all ranks end at byte {at} of {usual[1]}", [ranks[-1].rank]
    return None


def disagreements(found: Mapping[int, Digests]) -> list[pb.Disagreement]:
    """The parts on which ranks disagree, in order.

    Args:
        found: by rank. A part that only one rank looked at is not compared.
    """
    ranks_by_part: dict[int, dict[bytes, list[int]]] = {}
    for rank, digests in sorted(found.items()):
        for part, digest in digests.items():
            ranks_by_part.setdefault(part, {}).setdefault(digest, []).append(rank)
    return [
        _disagreement(part, list(by_digest.values()))
        for part, by_digest in sorted(ranks_by_part.items())
        if len(by_digest) > 1
    ]


def _disagreement(part: int, groups: Sequence[list[int]]) -> pb.Disagreement:
    most = max(groups, key=len)
    minority = 2 * len(most) > sum(map(len, groups))
    named = (rank for group in groups if not (minority and group is most) for rank in group)
    return pb.Disagreement(part=part, ranks=sorted(named), minority=minority)


def describe(found: Sequence[pb.Disagreement]) -> str:
    """A sentence about the ranks and the parts."""
    parts: dict[tuple[tuple[int, ...], bool], list[int]] = {}
    for one in found:
        parts.setdefault((tuple(one.ranks), one.minority), []).append(one.part)
    who = [
        f"{_ranks(ranks)} {'differs from most others' if minority else 'differ from each other'} "
        f"in {_list('part', numbers)}"
        for (ranks, minority), numbers in list(parts.items())[:_NAMED_MAX]
    ]
    more = "; and others" if len(parts) > _NAMED_MAX else ""
    return (
        f"ranks disagree about a state that all should hold alike: {'; '.join(who)}{more}. "
        "Nothing of this step was committed"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return _list("rank", ranks)


def _list(what: str, numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_NAMED_MAX]))
    more = f" and {len(numbers) - _NAMED_MAX} more" if len(numbers) > _NAMED_MAX else ""
    return f"{what} {shown}{more}"
