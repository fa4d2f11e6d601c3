"""Where shards go: never two copies together, the same holders step after step, bounded, balanced, in other domains."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheck_proto.placement_groups import Groups
from fastcheckd.errors import PlacementError
from fastcheckd.placement import place, plan_shards, substitute

CHUNK = 4 << 20
names = st.integers(0, 60).map(lambda n: f"node-{n}")
labels = st.sampled_from(["", "a", "b", "c", "d"])
memberships = st.dictionaries(names, labels, min_size=2, max_size=40)


def named(count, racks=0):
    return {f"node-{n:04}": f"rack-{n % racks}" if racks else "" for n in range(count)}


def fails_with(node, label):
    return label or ("itself", node)


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


@given(memberships, st.integers(1, 6))
def test_groups_partition_the_members_and_are_bounded(members, spread):
    groups = Groups(members, spread)
    together = {m: frozenset({m, *groups.ring(m)}) for m in members}
    for member, group in together.items():
        assert member in group and all(together[other] == group for other in group)
        assert len(group) <= 2 * spread + 1
        assert len(group) >= min(spread + 1, len(members))
        assert {*groups.strangers(member)} == {*members} - group


@given(st.integers(2, 8), st.integers(1, 12), st.integers(1, 5))
def test_neighbours_in_a_group_lie_in_different_domains(racks, rounds, spread):
    groups = Groups(named(racks * rounds, racks), spread)
    racks_in_order = [int(node[-4:]) % racks for node in groups.order]
    for start in range(len(racks_in_order) - racks + 1):
        assert len({*racks_in_order[start : start + racks]}) == racks


@st.composite
def situations(draw):
    members = draw(memberships)
    tolerate = draw(st.integers(1, min(3, len(members) - 1)))
    owner = draw(st.sampled_from(sorted(members)))
    known = st.sampled_from([*sorted(members), "gone-1", "gone-2"])
    return {
        "members": members,
        "owner": owner,
        "owner_domain": members[owner],
        "job": draw(st.sampled_from(["gpt", "bert"])),
        "rank": draw(st.integers(0, 100)),
        "state_bytes": draw(st.integers(0, 1 << 30)),
        "chunk_bytes": CHUNK,
        "tolerate": tolerate,
        "spread": draw(st.integers(tolerate, 6)),
        "avoid": draw(st.sets(st.sampled_from(sorted(members)))),
        "previous": draw(st.lists(st.lists(known, min_size=0, max_size=3), max_size=6)),
        "load": draw(st.dictionaries(st.sampled_from(sorted(members)), st.integers(0, 1 << 34))),
    }


@given(situations())
def test_every_shard_has_its_holders_and_never_the_owner(s):
    plan = place(**s)
    turned = dict(reversed(s["members"].items()))
    assert place(**(s | {"members": turned})) == plan, "order must not matter"
    assert place(**s, groups=Groups(s["members"], s["spread"])) == plan, "kept groups are those made anew"
    assert 1 <= len(plan.shards) <= (len(s["previous"]) or s["spread"])
    assert sum(p.size_bytes for p in plan.shards) == s["state_bytes"]
    for index, planned in enumerate(plan.shards):
        assert planned.shard == index
        assert len(set(planned.holders)) == len(planned.holders) == s["tolerate"]
        assert s["owner"] not in planned.holders
        assert set(planned.holders) <= set(s["members"])


@given(situations())
def test_avoided_nodes_hold_nothing_while_others_can(s):
    plan = place(**s)
    healthy = set(s["members"]) - {s["owner"]} - s["avoid"]
    for planned in plan.shards:
        used = set(planned.holders)
        assert len(used & s["avoid"]) == max(0, s["tolerate"] - len(healthy))


@given(situations())
def test_the_first_holders_are_of_the_owners_group_unless_it_has_too_few(s):
    s |= {"previous": ()}
    plan = place(**s)
    used = {h for p in plan.shards for h in p.holders}
    group = set(Groups(s["members"], s["spread"]).ring(s["owner"]))
    domains = {fails_with(n, s["members"][n]) for n in group - s["avoid"]}
    domains.discard(fails_with(s["owner"], s["owner_domain"]))
    if len(domains) >= s["tolerate"]:
        assert used <= group
        assert len(used) <= s["spread"]


@given(situations())
def test_copies_lie_in_different_domains_or_it_is_said_that_they_cannot(s):
    plan = place(**s)
    healthy = set(s["members"]) - {s["owner"]} - s["avoid"]
    own = fails_with(s["owner"], s["owner_domain"])
    foreign = {fails_with(node, s["members"][node]) for node in healthy} - {own}
    apart = True
    for planned in plan.shards:
        domains = [own, *(fails_with(node, s["members"][node]) for node in planned.holders)]
        apart = apart and len(set(domains)) == len(domains)
        assert len(set(domains) - {own}) >= min(len(foreign), s["tolerate"]) or s["previous"]
    assert plan.domains_short == (not apart)
    if len(foreign) >= s["tolerate"]:
        assert not plan.domains_short


@given(situations(), st.randoms(use_true_random=False))
def test_a_rank_keeps_its_holders_and_only_the_lost_are_replaced(s, rnd):
    first = place(**(s | {"previous": (), "avoid": set()}))
    before = [planned.holders for planned in first.shards]
    # Others come and go, loads change, and one holder is lost.
    members = dict(s["members"])
    used = {h for holders in before for h in holders}
    lost = rnd.choice(sorted(used))
    for node in sorted(set(members) - used - {s["owner"]}):
        if rnd.random() < 0.3:
            del members[node]
    members |= {f"new-{n}": "" for n in range(rnd.randrange(4))}
    del members[lost]
    if len(members) - 1 < s["tolerate"]:
        return
    second = place(**(s | {"members": members, "avoid": set(), "previous": before}))
    assert len(second.shards) == len(before)
    for old, planned in zip(before, second.shards, strict=True):
        stayed = [h for h in old if h != lost]
        if not first.domains_short:
            assert [h for h in planned.holders if h in stayed] == stayed
            assert len(set(planned.holders) - set(old)) == (1 if lost in old else 0)
    if lost not in members:
        third = place(
            **(s | {"members": members, "avoid": set(), "previous": [p.holders for p in second.shards]})
        )
        assert third == second, "what was chosen stays"


@given(situations(), st.randoms(use_true_random=False))
def test_a_substitute_is_whom_the_next_placement_would_take(s, rnd):
    s |= {"avoid": set(), "previous": ()}
    before = [planned.holders for planned in place(**s).shards]
    shard = rnd.randrange(len(before))
    lost = rnd.choice(before[shard])
    members = {n: d for n, d in s["members"].items() if n != lost}
    if len(members) - 1 < s["tolerate"]:
        return
    left = [[h for h in holders if h != lost] for holders in before]
    # The shards before this one have theirs already.
    planned = place(**(s | {"members": members, "previous": left}))
    left[:shard] = [list(p.holders) for p in planned.shards[:shard]]
    domains_of = s["members"]
    asked = {k: s[k] for k in ("owner", "owner_domain", "job", "rank", "tolerate", "spread", "load")}
    if place(**(s | {"members": members, "previous": left})) != planned:
        return  # the members left have too few domains: what stays is open
    found = substitute(**asked, members=members, holders=left[shard], domains_of=domains_of, previous=left)
    kept = [h for h in left[shard] if h in planned.shards[shard].holders]
    if kept == left[shard]:
        assert found == next(h for h in planned.shards[shard].holders if h not in kept)


def test_nobody_left_is_no_substitute():
    asked = {"owner": "a", "owner_domain": "", "job": "j", "rank": 0, "tolerate": 1, "spread": 3}
    assert substitute(**asked, members={"a": "", "b": ""}, holders=["b"], domains_of={}) is None
    assert substitute(**asked, members={"a": ""}, holders=[], domains_of={}) is None
    assert substitute(**asked, members={}, holders=["b"], domains_of={}) is None


def test_a_substitute_heeds_the_domain_of_a_holder_that_is_no_member_any_more():
    asked = {
        "owner": "a",
        "owner_domain": "r1",
        "job": "j",
        "rank": 0,
        "tolerate": 2,
        "spread": 3,
    }
    members = {"a": "r1", "c": "r2", "d": "r3"}
    assert substitute(**asked, members=members, holders=["b"], domains_of={"b": "r2"}) == "d"
    del members["d"]
    assert substitute(**asked, members=members, holders=["b"], domains_of={"b": "r2"}) == "c"


def test_a_rack_that_is_called_like_a_node_is_not_that_node():
    plan = place(
        members={"a": "", "b": "a", "c": "b"}, owner="a", owner_domain="a", job="j", rank=0,
        state_bytes=CHUNK, chunk_bytes=CHUNK, tolerate=2, spread=2,
    )  # fmt: skip
    assert not plan.domains_short


@settings(max_examples=12)  # of 42 that there are
@given(st.integers(4, 24), st.integers(1, 2))
def test_holders_in_a_group_get_about_the_same(count, tolerate):
    members, load = named(count), Counter()
    mates = {owner: len(Groups(members, 3).ring(owner)) for owner in members}
    ranks = 60  # a whole number of rounds in groups of any size
    for rank in range(ranks * count):
        owner = f"node-{rank // ranks:04}"
        for planned in place(
            members=members, owner=owner, owner_domain="", job="gpt", rank=rank, state_bytes=3 * CHUNK,
            chunk_bytes=CHUNK, tolerate=tolerate, spread=3,
        ).shards:  # fmt: skip
            load.update(dict.fromkeys(planned.holders, planned.size_bytes))
    assert all(3 <= m <= 6 for m in mates.values())
    assert set(load.values()) == {ranks * 3 * tolerate * CHUNK}


def test_a_node_that_already_holds_much_more_is_left_out_while_others_can():
    members = named(7)
    busy = {"node-0003": 1 << 40}
    used = set()
    for rank in range(20):
        plan = place(
            members=members, owner="node-0000", owner_domain="", job="gpt", rank=rank,
            state_bytes=30 * CHUNK, chunk_bytes=CHUNK, tolerate=1, spread=3, load=busy,
        )  # fmt: skip
        used |= {h for p in plan.shards for h in p.holders}
    assert used == set(members) - {"node-0000", "node-0003"}


def test_an_empty_node_gets_no_more_than_its_part_of_a_rank():
    members, load = named(7), {f"node-{n:04}": 1 << 40 for n in range(7) if n != 5}
    plan = place(
        members=members, owner="node-0000", owner_domain="", job="gpt", rank=0,
        state_bytes=30 * CHUNK, chunk_bytes=CHUNK, tolerate=1, spread=3, load=load,
    )  # fmt: skip
    assert Counter(h for p in plan.shards for h in p.holders)["node-0005"] == 1


class Large:
    """1,000 nodes, 8 ranks each, sizes varying by 20 % either way."""

    def __init__(self, seed, racks=0, order=None):
        self.members, self.load, self.plans = named(1000, racks), Counter(), {}
        rnd = random.Random(seed)
        self.sizes = [int((1 << 30) * rnd.uniform(0.8, 1.2)) for _ in range(8000)]
        ranks = list(range(8000))
        if order == "mixed":
            rnd.shuffle(ranks)
        groups = Groups(self.members, 3)
        for rank in ranks:
            self.plans[rank] = self.place(rank, self.members, groups)
            for planned in self.plans[rank].shards:
                self.load.update(dict.fromkeys(planned.holders, planned.size_bytes))

    def place(self, rank, members, groups, previous=()):
        owner = f"node-{rank // 8:04}"
        return place(
            members=members, owner=owner, owner_domain=self.members[owner], job="gpt", rank=rank,
            state_bytes=self.sizes[rank], chunk_bytes=CHUNK, tolerate=1, spread=3,
            load=self.load, groups=groups, previous=previous,
        )  # fmt: skip


@pytest.mark.parametrize("order", ["by rank", "mixed"])
@pytest.mark.parametrize("racks", [0, 20])
def test_of_a_thousand_nodes_none_holds_a_tenth_more_or_less_than_the_mean(racks, order):
    large = Large(1, racks, order)
    mean = sum(large.load.values()) / 1000
    assert len(large.load) == 1000
    assert max(large.load.values()) <= 1.1 * mean
    assert min(large.load.values()) >= 0.9 * mean
    assert not any(plan.domains_short for plan in large.plans.values())


def test_after_one_loss_in_a_thousand_exactly_its_bytes_move():
    large = Large(2)
    lost = "node-0444"
    held = large.load.pop(lost)
    members = {n: d for n, d in large.members.items() if n != lost}
    groups = Groups(large.members, 3)
    moved, gained = 0, Counter()
    for rank, plan in large.plans.items():
        if rank // 8 == 444:
            continue  # its own ranks have nobody to place them
        again = large.place(rank, members, groups, [p.holders for p in plan.shards])
        for old, new in zip(plan.shards, again.shards, strict=True):
            fresh = set(new.holders) - set(old.holders)
            moved += len(fresh) * new.size_bytes
            gained.update(dict.fromkeys(fresh, new.size_bytes))
            assert bool(fresh) == (lost in old.holders)
    assert 0.95 * held <= moved <= 1.05 * held
    assert set(gained) <= set(groups.ring(lost)), "its group makes up for it"


def test_too_few_nodes_says_how_many_are_needed():
    with pytest.raises(PlacementError, match=r"^2 healthy nodes beside the owner node-0 .* only 1"):
        place(
            members={"node-0": "", "node-1": ""}, owner="node-0", owner_domain="", job="gpt", rank=0,
            state_bytes=1, chunk_bytes=4096, tolerate=2, spread=3,
        )  # fmt: skip
