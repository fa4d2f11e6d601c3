import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheckd.errors import PlacementError
from fastcheckd.placement import group_of, place, plan_shards

nodes = st.sets(st.integers(0, 60).map(lambda n: f"node-{n}"), min_size=2, max_size=40)


@given(st.integers(0, 1 << 34), st.integers(16, 4096).map(lambda k: k * 4096), st.integers(1, 9))
def test_shards_tile_the_state_on_chunk_boundaries(state_bytes, chunk_bytes, count_max):
    shards = plan_shards(state_bytes, chunk_bytes, count_max)
    assert 1 <= len(shards) <= count_max
    at = 0
    for offset, size in shards:
        assert offset == at and offset % chunk_bytes == 0
        assert size > 0 or state_bytes == 0
        at += size
    assert at == state_bytes
    sizes = [size for _, size in shards]
    assert max(sizes) - min(sizes) <= 2 * chunk_bytes


def test_an_empty_state_is_one_shard_of_no_bytes():
    assert plan_shards(0, 4096, 3) == ((0, 0),)


@given(nodes, st.integers(1, 6))
def test_groups_partition_the_members_and_are_bounded(members, spread):
    groups = {m: frozenset({m, *group_of(m, members, spread)}) for m in members}
    for member, group in groups.items():
        assert member in group and all(groups[other] == group for other in group)
        assert len(group) <= 2 * spread + 1
        assert len(group) >= min(spread + 1, len(members))


@st.composite
def situations(draw):
    members = sorted(draw(nodes))
    tolerate = draw(st.integers(1, min(3, len(members) - 1)))
    return {
        "members": members,
        "owner": draw(st.sampled_from(members)),
        "job": draw(st.sampled_from(["gpt", "bert"])),
        "rank": draw(st.integers(0, 100)),
        "state_bytes": draw(st.integers(0, 1 << 30)),
        "chunk_bytes": 4 << 20,
        "tolerate": tolerate,
        "spread": draw(st.integers(tolerate, 6)),
        "avoid": draw(st.sets(st.sampled_from(members))),
    }


@given(situations())
def test_every_shard_has_its_holders_and_never_the_owner(s):
    shards = place(**s)
    assert place(**(s | {"members": list(reversed(s["members"]))})) == shards, "order must not matter"
    assert 1 <= len(shards) <= s["spread"]
    assert sum(p.size_bytes for p in shards) == s["state_bytes"]
    for index, planned in enumerate(shards):
        assert planned.shard == index
        assert len(set(planned.holders)) == len(planned.holders) == s["tolerate"]
        assert s["owner"] not in planned.holders
        assert set(planned.holders) <= set(s["members"])
    used = {h for p in shards for h in p.holders}
    assert len(used) <= s["spread"]


@given(situations())
def test_avoided_nodes_hold_nothing_while_others_can(s):
    used = {h for p in place(**s) for h in p.holders}
    healthy = set(s["members"]) - {s["owner"]} - s["avoid"]
    if len(healthy) >= s["tolerate"]:
        assert not used & s["avoid"]
    group = set(group_of(s["owner"], s["members"], s["spread"]))
    if len(group - s["avoid"]) >= s["tolerate"]:
        assert used <= group, "strangers only when the group cannot do it"


@given(st.integers(4, 24), st.integers(1, 2))
def test_holders_in_a_group_get_about_the_same(count, tolerate):
    members = [f"node-{n:02}" for n in range(count)]
    load = dict.fromkeys(members, 0)
    for rank, owner in enumerate(members):
        for planned in place(
            members=members, owner=owner, job="gpt", rank=rank, state_bytes=3 * 64 << 20,
            chunk_bytes=4 << 20, tolerate=tolerate, spread=3,
        ):  # fmt: skip
            for holder in planned.holders:
                load[holder] += planned.size_bytes
    assert set(load.values()) == {3 * tolerate * 64 << 20}


def test_too_few_nodes_says_how_many_are_needed():
    with pytest.raises(PlacementError, match=r"^2 healthy nodes beside the owner node-0 .* only 1"):
        place(
            members=["node-0", "node-1"], owner="node-0", job="gpt", rank=0, state_bytes=1,
            chunk_bytes=4096, tolerate=2, spread=3,
        )  # fmt: skip
