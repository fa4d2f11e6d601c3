"""What a view says of a job, and of which sessions it says nothing."""

from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.identity import Identity
from fastcheckd.store.retention import Kept
from fastcheckd.view import ViewFollower


def follower(**job):
    view = ViewFollower(None, Identity("a"))  # type: ignore[arg-type]
    view.view = rpb.ClusterView(jobs=[rpb.JobView(job="gpt", **job)])
    return view


def test_a_view_speaks_of_the_sessions_that_it_knows():
    view = follower(kept_steps=[3, 9], void_below_session=2, next_session=5)
    assert view.speaks_of("gpt", 4) and not view.speaks_of("gpt", 5)
    assert view.is_void("gpt", 1) and not view.is_void("gpt", 2)
    assert view.retention() == {"gpt": Kept(frozenset({3, 9}), 2, 5)}
    assert not view.is_void("other", 1)


def test_the_view_of_a_version_that_tells_nothing_of_sessions_is_taken_as_it_always_was():
    view = follower(kept_steps=[3])
    assert view.speaks_of("gpt", 10**6) and not view.is_void("gpt", 1)
