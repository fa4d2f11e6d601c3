"""What a rank has set aside, and what the budgets are compared with."""

from fastcheck_proto.v1 import trainer_pb2 as tpb
from fastcheckd.save.contract import (
    LEAN_SEGMENTS,
    ROOM,
    SLOTS_BYTES,
    Contract,
    Demand,
    Holding,
    advice,
    ample_bytes,
    lean_bytes,
    settle,
    whole_bytes,
)


def test_ample_is_every_step_as_it_is_at_owner_and_holders():
    assert ample_bytes(1000, tolerate=1, keep_steps=2) == round(6000 * ROOM)
    assert ample_bytes(1000, tolerate=2, keep_steps=1) == round(6000 * ROOM)


def test_lean_is_two_steps_and_a_replica_for_each_holder_and_reverse_deltas():
    assert lean_bytes(1000, tolerate=1, keep_steps=1) == 3350 + SLOTS_BYTES
    assert lean_bytes(1000, tolerate=1, keep_steps=2) == 4400 + SLOTS_BYTES


def test_lean_is_always_less():
    for tolerate in range(1, 5):
        for keep_steps in range(1, 6):
            sizes = {"tolerate": tolerate, "keep_steps": keep_steps}
            assert lean_bytes(10**9, **sizes) < ample_bytes(10**9, **sizes)


def told(state_bytes, budget_bytes, *holdings, job=""):
    return advice(
        state_bytes, tolerate=1, keep_steps=2, budget_bytes=budget_bytes, holdings=holdings, job=job
    )


def test_the_advice_names_a_larger_budget_than_there_is_or_none():
    lean = lean_bytes(10**9, tolerate=1, keep_steps=2)
    ample = ample_bytes(10**9, tolerate=1, keep_steps=2)
    assert f"at least {lean}" in told(10**9, lean - 1) and str(ample) in told(10**9, lean - 1)
    assert "at least" not in told(10**9, lean) and f"should be {ample}" in told(10**9, lean)
    assert "is enough for that" in told(10**9, ample)


def test_for_small_states_slots_count_more_than_what_the_codec_saves():
    ample = ample_bytes(1000, tolerate=1, keep_steps=2)
    assert told(1000, ample - 1).split(";")[0].endswith(f"at least {ample}")


def test_the_advice_says_who_has_the_memory():
    text = told(1000, 10**9, Holding("small", 3), Holding("large", 510, 300, 10))
    assert text.endswith(
        "; bytes in use: job 'large' 510 (300 in steps that are not committed, 10 in copies for other nodes); "
        "job 'small' 3"
    )


def demand(budget_bytes, own_bytes=1000, others_bytes=0, copies_bytes=0):
    return Demand(
        budget_bytes=budget_bytes, own_bytes=own_bytes, others_bytes=others_bytes, copies_bytes=copies_bytes
    )


def settled(*demands, keep_steps=2, in_flight=2):
    contract = settle(demands, 1000, keep_steps=keep_steps, in_flight=in_flight)
    return contract.lean, contract.segments


def test_a_full_contract_has_a_segment_for_each_step_that_is_kept_or_may_be_under_way():
    assert settled(demand(10**6), demand(0)) == (False, 4)
    assert settled(demand(10**6), keep_steps=1, in_flight=5) == (False, 6)


def test_where_there_is_less_room_fewer_steps_are_under_way_before_it_is_lean():
    need = whole_bytes(1000, keep_steps=2)
    assert settled(demand(need)) == (False, 3)
    assert settled(demand(need - 1)) == (True, LEAN_SEGMENTS)
    assert settled(demand(round(4000 * ROOM) + 1)) == (False, 4)


def test_copies_for_others_and_what_others_have_set_aside_count():
    with_copies = whole_bytes(2000, keep_steps=2)
    assert settled(demand(with_copies, copies_bytes=1000)) == (False, 3)
    assert settled(demand(with_copies - 1, copies_bytes=1000)) == (True, 2)
    # Another rank of the same size has four: this one is full with the three that it must have.
    assert settled(demand(with_copies, own_bytes=2000, others_bytes=4000)) == (False, 3)


def test_the_tighter_of_two_budgets_counts_and_one_that_is_none_does_not():
    assert settled(demand(10**6), demand(2000)) == (True, 2)
    assert settled(demand(2000), demand(0)) == (True, 2)


def test_what_the_trainer_is_told():
    told = Contract(lean=True, segments=2, segment_bytes=4096).message(offered=2)
    assert (told.contract, told.segments, told.bytes, told.offered) == (
        tpb.MEMORY_CONTRACT_LEAN, 2, 8192, 2,
    )  # fmt: skip
