"""What the budget is compared with."""

from fastcheckd.saving.room_needed import ROOM, SLOTS_BYTES, advice, ample_bytes, lean_bytes


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


def test_the_advice_has_both_numbers():
    text = advice(1000, tolerate=1, keep_steps=2)
    assert str(ample_bytes(1000, tolerate=1, keep_steps=2)) in text
    assert str(lean_bytes(1000, tolerate=1, keep_steps=2)) in text
