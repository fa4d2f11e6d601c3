"""What the budget is compared with."""

from fastcheckd.save.contract import ROOM, SLOTS_BYTES, Holding, advice, ample_bytes, lean_bytes


def test_ample_is_every_step_as_it_is_at_owner_and_holders():
    assert ample_bytes(1000, tolerate=1, keep_steps=2) == round(6000 * ROOM)
    assert ample_bytes(1000, tolerate=2, keep_steps=1) == round(6000 * ROOM)


def test_lean_is_two_steps_and_a_replica_for_each_holder_and_ways_back():
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
