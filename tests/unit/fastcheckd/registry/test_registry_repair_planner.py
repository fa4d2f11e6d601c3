"""What a leader has made next: targets, sources, who is waited for, and what is not tried again yet."""

from __future__ import annotations

from small_cluster import apply, register, rehold, set_state
from test_registry_redundancy import lose, make, node, rank, shard, step

from fastcheck_proto.v1.registry_pb2 import NodeRecord
from fastcheckd.registry.model import DOWN, UP, Job, Ref, ShardId, State
from fastcheckd.registry.redundancy import RecordedReplica, survey
from fastcheckd.registry.repair_planner import GONE_GRACE_S, RETURN_GRACE_S, Absences, Order, Planner

A, B, C, D, E = (Ref(name, 1) for name in "abcde")


def planner(*, tolerate: int = 1, domain_key: str = "", orders_max: int = 32) -> Planner:
    return Planner(tolerate=tolerate, spread=3, domain_key=domain_key, orders_max=orders_max)


def orders(
    plan: Planner,
    state: State,
    *,
    spared: frozenset[Ref] = frozenset(),
    unwell: frozenset[str] = frozenset(),
    under_way: dict[ShardId, Order] | None = None,
    now: float = 0.0,
) -> list[Order]:
    found = survey(state, tolerate=plan.tolerate, domain_key=plan.domain_key)
    return plan.orders(state, found, spared=spared, unwell=unwell, under_way=under_way or {}, now=now)


def five(**states: str) -> dict[str, NodeRecord]:
    return {name: node(states.get(name, "UP")) for name in "abcde"}


def one_shard(nodes: dict[str, NodeRecord], owner: Ref, *holders: Ref, lost: Ref | None = None) -> State:
    state = make(nodes, gpt=[step(1, rank(0, owner, shard(*holders)))])
    lose(state, [RecordedReplica(ShardId("gpt", 1, 0, 0), lost)] if lost else [])
    return state


def test_the_copy_of_a_dead_holder_goes_to_another_node_and_takes_its_place_in_the_record() -> None:
    (order,) = orders(planner(), one_shard(five(b="DOWN"), A, B))
    assert order.target.node_id in "cde" and order.sources == (A,) and order.replaces == B
    assert Ref.of(order.change().add) == order.target and Ref.of(order.change().remove) == ("b", 1)


def test_copies_of_a_dead_owner_become_one_more_holder() -> None:
    (order,) = orders(planner(), one_shard(five(a="DOWN"), A, B))
    assert order.target.node_id in "cde" and order.sources == (B,) and order.replaces is None


def test_a_draining_node_is_read_last_and_leaves_the_record_when_its_copy_is_elsewhere() -> None:
    (order,) = orders(planner(tolerate=2), one_shard(five(b="DRAINING"), A, B, C))
    assert order.sources == (C, A, B) and order.replaces == B
    assert order.target.node_id in "de"


def test_nothing_is_made_for_a_life_that_may_come_back_by_itself() -> None:
    state = one_shard(five(b="DOWN"), A, B)
    assert orders(planner(), state, spared=frozenset({B})) == []
    # Two are missing and one of them is waited for: the other is made.
    (order,) = orders(
        planner(tolerate=2), one_shard(five(b="DOWN", c="DOWN"), A, B, C), spared=frozenset({B})
    )
    assert order.replaces == C


def test_a_shard_without_any_copy_left_is_not_tried() -> None:
    assert orders(planner(), one_shard(five(a="DOWN", b="DOWN"), A, B)) == []


def test_each_target_makes_one_copy_at_a_time_and_all_together_a_bounded_number() -> None:
    ranks = [rank(r, A, *(shard(B) for _ in range(3))) for r in range(4)]
    state = make(five(b="DOWN"), gpt=[step(1, *ranks)])
    made = orders(planner(), state)
    assert sorted(order.target.node_id for order in made) == ["c", "d", "e"]
    assert len(orders(planner(orders_max=2), state)) == 2
    under_way = {order.shortage.id: order for order in made}
    assert orders(planner(), state, under_way=under_way) == []
    first = made[0]
    (another,) = orders(
        planner(), state, under_way={k: v for k, v in under_way.items() if k != first.shortage.id}
    )
    assert another.target == first.target


def test_sources_of_copies_made_at_once_are_different_ones() -> None:
    ranks = [rank(r, A, shard(B, C, D)) for r in range(2)]
    nodes = {**five(a="DOWN"), **{name: node() for name in "fgh"}}
    made = orders(planner(tolerate=3), make(nodes, gpt=[step(1, *ranks)]))
    assert len(made) == 2 and made[0].sources[0] != made[1].sources[0]


def test_suspects_get_nothing_and_are_asked_last() -> None:
    (order,) = orders(planner(tolerate=2), one_shard(five(d="DOWN"), A, B, D), unwell=frozenset({"b", "c"}))
    assert order.target == E and order.sources == (A, B)


def test_a_full_node_gets_nothing() -> None:
    nodes = five(b="DOWN")
    for name in "cd":
        nodes[name].ram_budget_bytes = 5
    (order,) = orders(planner(), one_shard(nodes, A, B))
    assert order.target == E


def test_after_a_failure_another_target_is_tried_and_the_first_again_later() -> None:
    plan = planner()
    state = one_shard(five(b="DOWN", d="DOWN", e="DOWN"), A, B)
    (order,) = orders(plan, state, now=10.0)
    assert order.target == C
    plan.attempts.failed(order.shortage.id, "c", 10.0)
    assert orders(plan, state, now=10.5) == []
    plan.attempts.membership_changed()
    state.nodes["d"].state = UP
    (order,) = orders(plan, state, now=10.6)
    assert order.target == D
    state.nodes["d"].state = DOWN
    (order,) = orders(plan, state, now=20.0)
    assert order.target == C


def test_failures_double_the_pause_and_are_forgotten_with_the_shortage() -> None:
    plan = planner()
    name = ShardId("gpt", 1, 0, 0)
    for _ in range(4):
        plan.attempts.failed(name, "c", 0.0)
    assert plan.attempts.refused(name, 7.9) == {"c"} and plan.attempts.refused(name, 8.1) == set()
    plan.attempts.keep(set())
    plan.attempts.failed(name, "c", 0.0)
    assert plan.attempts.refused(name, 1.1) == set()


def test_a_node_back_in_a_new_life_takes_its_own_earlier_ones_place() -> None:
    nodes = {"a": node(), "b": node(incarnation=2)}
    (order,) = orders(planner(), one_shard(nodes, A, B))
    assert order.target == Ref("b", 2) and order.replaces is None


def test_a_copy_that_its_node_lost_is_made_elsewhere_and_there_again_if_nobody_else_is_left() -> None:
    (order,) = orders(planner(), one_shard(five(), A, B, lost=B))
    assert order.target.node_id in "cde" and order.replaces == B and not order.refill
    (order,) = orders(planner(), one_shard({"a": node(), "b": node()}, A, B, lost=B))
    assert order.target == B and order.refill


def test_bytes_that_the_owner_lost_are_kept_by_one_more_holder() -> None:
    (order,) = orders(planner(), one_shard(five(), A, B, lost=A))
    assert order.target.node_id in "cde" and order.sources == (B,) and order.replaces is None


def test_copies_in_one_rack_are_brought_apart_when_there_are_racks() -> None:
    nodes = {"a": node(rack="x"), "b": node(rack="x"), "c": node(rack="x"), "d": node(rack="y")}
    (order,) = orders(planner(domain_key="rack"), one_shard(nodes, A, B))
    assert order.target == D and order.replaces == B
    nodes["d"].state = DOWN
    assert orders(planner(domain_key="rack"), one_shard(nodes, A, B)) == []


def test_who_is_gone_is_waited_for_a_little_and_who_is_back_for_as_long_as_it_tells() -> None:
    absences = Absences()
    down = {"b": node("DOWN")}
    assert absences.spared({B}, down, 0.0) == {B}
    assert absences.spared({B}, down, GONE_GRACE_S - 0.1) == {B}
    assert absences.spared({B}, down, GONE_GRACE_S + 0.1) == set()
    back = {"b": node(incarnation=2)}
    at = 100.0
    assert absences.spared({B}, back, at) == {B}
    assert absences.spared({B}, back, at + RETURN_GRACE_S - 0.1) == {B}
    absences.heard(Ref("b", 2), at + 4.0, finished=False)
    assert absences.spared({B}, back, at + 4.0 + RETURN_GRACE_S - 0.1) == {B}
    assert absences.spared({B}, back, at + 4.0 + RETURN_GRACE_S + 0.1) == set()


def test_who_is_back_and_has_told_all_is_waited_for_no_more() -> None:
    absences = Absences()
    back = {"b": node(incarnation=2)}
    assert absences.spared({B}, back, 0.0) == {B}
    absences.heard(Ref("b", 2), 0.1, finished=True)
    assert absences.spared({B}, back, 0.2) == set()
    # In its next life it may have something again.
    assert absences.spared({B}, {"b": node(incarnation=3)}, 0.3) == {B}


def test_the_state_machine_takes_what_an_order_proposes() -> None:
    state = State()
    for name in "abcd":
        assert apply(state, register(name)).ok
    refs = {name: Ref.of(state.nodes[name]) for name in "abcd"}
    steps = [step(1, rank(0, refs["a"], shard(refs["b"])))]
    state.jobs["gpt"] = Job("gpt", next_session=2, newest=1, world_size=1, recent=[(1, 2)], steps=steps)
    assert apply(state, set_state(refs["b"], "DOWN")).ok
    (order,) = orders(planner(), state)
    assert apply(state, rehold(order.change())).why == [""]
    assert survey(state, tolerate=1).shortages == ()
