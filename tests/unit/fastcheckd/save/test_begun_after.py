"""What a save can say of the sessions that were open when it was begun, from how long the newest load has been open."""

from hypothesis import given
from hypothesis import strategies as st

from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.save.placement_client import begun_after

#: Whole ones: their differences are exact.
times = st.integers(0, 100)


@given(
    loads=st.lists(times, max_size=5),
    begun=times,
    asked=times,
    view=st.integers(0, 5),
    late=st.integers(0, 50),
)
def test_it_never_says_that_a_load_was_open_which_came_later(loads, begun, asked, view, late):
    """Loads are sessions 1, 2, ... at these times. The leader answers at `asked`; that is read `late` after it."""
    opened = sorted(loads)
    asked = max(asked, begun)
    seen = [number for number, at in enumerate(opened, 1) if at <= asked]
    placed = rpb.PlaceResponse()
    if seen:
        placed.newest_load = seen[-1]
        placed.newest_load_age_s = asked - opened[seen[-1] - 1]
    before = [number for number, at in enumerate(opened, 1) if at <= begun]
    known = min(view, len(before)) + 1  # what a view from before it may know
    found = begun_after(known, placed, asked + late - begun)
    assert known <= found <= len(before) + 1
    if late == 0 and seen == before:
        assert found == len(before) + 1


def test_a_registry_that_tells_nothing_changes_nothing():
    assert begun_after(3, rpb.PlaceResponse(), 0.0) == 3
    assert begun_after(0, rpb.PlaceResponse(newest_load=7, newest_load_age_s=9.0), float("inf")) == 0
