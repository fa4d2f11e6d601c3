"""What becomes of a node's report of what it holds."""

from __future__ import annotations

from typing import Any

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.registry.model import Job, Ref, ShardId, State
from fastcheckd.registry.redundancy import RecordedReplica
from fastcheckd.services.registry_maintenance import sort_inventory

DIGEST = b"\xab" * 16
NEW = Ref("b", 2)
COPY, OWNER, GONE = pb.REPLICA_KIND_COPY, pb.REPLICA_KIND_OWNER, pb.REPLICA_KIND_UNSPECIFIED


def state(owner: tuple[str, int], *holders: list[tuple[str, int]]) -> State:
    """One job, one step, one rank; a shard for each list of holders."""
    shards = [
        rpb.ShardRecord(bytes=1, digest=DIGEST, holders=[Ref(*ref).message() for ref in refs])
        for refs in holders
    ]
    record = rpb.RankRecord(session=1, owner=Ref(*owner).message(), state_bytes=1, shards=shards)
    kept = rpb.StepRecord(step=5, world_size=1, copies=1, ranks=[record])
    return State(jobs={"gpt": Job("gpt", next_session=2, newest=5, steps=[kept])})


def entry(shard: int = 0, kind: Any = COPY, *, step: int = 5, digest: bytes = DIGEST) -> rpb.InventoryEntry:
    key = pb.ShardKey(job="gpt", step=step, rank=0, shard=shard)
    return rpb.InventoryEntry(key=key, kind=kind, digest=digest)


def sort(known: State, *entries: rpb.InventoryEntry, short: tuple[int, ...] = ()) -> Any:
    return sort_inventory(known, NEW, entries, frozenset(ShardId("gpt", 5, 0, shard) for shard in short))


def test_a_copy_of_an_earlier_life_counts_again() -> None:
    found = sort(state(("a", 1), [("b", 1)]), entry())
    (change,) = found.changes
    assert not change.of_owner and Ref.of(change.add) == NEW and not change.HasField("remove")
    assert change.digest == DIGEST
    assert found.known == 0


def test_a_copy_that_counts_already_changes_nothing() -> None:
    found = sort(state(("a", 1), [("b", 2)]), entry())
    assert found.changes == [] and found.known == 1
    assert found.held == [RecordedReplica(ShardId("gpt", 5, 0, 0), NEW)]


def test_a_copy_that_was_replaced_meanwhile_is_taken_only_where_one_is_missing() -> None:
    known = state(("a", 1), [("c", 1)], [("d", 1)])
    found = sort(known, entry(0), entry(1), short=(1,))
    assert [change.key.shard for change in found.changes] == [1]


def test_other_bytes_and_other_steps_are_nobodys() -> None:
    found = sort(state(("a", 1), [("b", 1)]), entry(digest=b"\xcd" * 16), entry(step=4), entry(7), short=(0,))
    assert found.changes == [] and found.known == 0 and found.lost == []


def test_an_owner_counts_again_when_all_its_shards_are_here_and_not_before() -> None:
    known = state(("b", 1), [("c", 1)], [("d", 1)])
    assert sort(known, entry(0, OWNER)).changes == []
    assert sort(known, entry(0, OWNER), entry(0, OWNER)).changes == []
    (change,) = sort(known, entry(0, OWNER), entry(1, OWNER)).changes
    assert change.of_owner and Ref.of(change.add) == NEW


def test_an_owner_that_has_a_part_counts_where_that_is_short_and_takes_the_rest_back() -> None:
    known = state(("b", 1), [("c", 1)], [("d", 1)], [("d", 1)])
    found = sort(known, entry(1, OWNER), short=(1,))
    (change,) = found.changes
    assert change.of_owner and change.key.shard == 1 and Ref.of(change.add) == NEW
    assert change.absent == [0, 2]
    assert sort(known, entry(1, OWNER), short=(0,)).changes == [], "what is short is not what it has"


def test_bytes_that_a_node_restored_for_itself_serve_as_a_copy() -> None:
    (change,) = sort(state(("a", 1), [("c", 1)]), entry(0, OWNER), short=(0,)).changes
    assert not change.of_owner


def test_what_is_held_no_more_is_taken_back_by_its_holder_alone() -> None:
    found = sort(state(("a", 1), [("b", 2)], [("c", 1)]), entry(0, GONE), entry(1, GONE))
    assert found.lost == [RecordedReplica(ShardId("gpt", 5, 0, 0), NEW)]
    assert found.changes == []
