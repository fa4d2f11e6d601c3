"""What an agent thinks of its data process."""

from hypothesis import given
from hypothesis import strategies as st

from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.health.vitals import ProcessVitals

OK, STARTING = rpb.DATA_HEALTH_OK, rpb.DATA_HEALTH_STARTING
GONE, HUNG = rpb.DATA_HEALTH_GONE, rpb.DATA_HEALTH_HUNG


def vitals():
    return ProcessVitals(hung_after_s=10.0, step_s=2.5)


def test_from_start_to_the_first_answer_it_is_starting_however_long_that_takes():
    data = vitals()
    assert data.health(None) == STARTING
    for now in range(100):
        data.look(7, float(now))
        assert data.health(7) == STARTING and not data.must_restart
    data.answered()
    assert data.health(7) == OK


def test_a_process_that_ends_is_gone_at_once_and_its_successor_starts():
    data = vitals()
    data.look(7, 0.0)
    data.answered()
    assert data.health(None) == GONE, "before anybody has looked again"
    data.look(None, 0.5)
    assert data.health(None) == GONE
    assert data.health(8) == STARTING
    data.look(8, 1.0)
    assert data.health(8) == STARTING
    data.answered()
    assert data.health(8) == OK


def test_a_busy_process_is_ok_then_hung_then_to_be_ended():
    data = vitals()
    data.look(7, 0.0)
    data.answered()
    seen = []
    for now in range(1, 40):
        data.look(7, float(now))
        seen.append((data.health(7), data.must_restart))
    assert seen.index((HUNG, False)) == 9 and seen.index((HUNG, True)) == 29
    data.answered()
    assert data.health(7) == OK and not data.must_restart


def test_an_agent_that_slept_does_not_blame_the_data_process():
    data = vitals()
    data.look(7, 0.0)
    data.answered()
    data.look(7, 3600.0)
    assert data.health(7) == OK and not data.must_restart


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=50))
def test_one_that_answers_often_enough_is_never_hung(steps):
    data, now, mute_s = vitals(), 0.0, 0.0
    data.look(7, now)
    data.answered()
    for gap, answers in steps:
        now += gap
        mute_s += gap
        data.look(7, now)
        if answers or mute_s > 9:
            data.answered()
            mute_s = 0.0
        assert data.health(7) == OK
