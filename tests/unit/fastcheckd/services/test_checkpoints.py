"""What an operator sees of provisional steps, with a registry and without."""

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.services.admin_reports import with_provisional
from fastcheckd.services.health_of_jobs import provisional_codes

COMMITTED, REPLICATING, PROVISIONAL = (
    rpb.STEP_STATE_COMMITTED,
    rpb.STEP_STATE_REPLICATING,
    rpb.STEP_STATE_PROVISIONAL,
)


def replica(step, *, provisional=True):
    key = pb.ShardKey(job="gpt", step=step)
    return peer_pb2.Replica(
        key=key, owner="a", bytes=7, state_bytes=7, world_size=1, shard_count=1, provisional=provisional
    )


def view(*kept):
    return rpb.ClusterView(jobs=[rpb.JobView(job="gpt", kept_steps=kept)])


def shown(steps):
    return [(summary.step, summary.state) for summary in steps]


def test_without_a_registry_the_last_view_says_what_is_committed():
    held = {"b": [replica(4, provisional=False), replica(5), replica(6)], "a": [replica(6)]}
    found = with_provisional("gpt", view(4), None, held)
    assert shown(found) == [(4, COMMITTED), (5, PROVISIONAL), (6, PROVISIONAL)]
    assert [s.copies for s in found] == [1, 1, 1]


def test_a_replicated_step_that_nobody_reported_is_provisional_too():
    held = {"b": [replica(5, provisional=False)]}
    assert shown(with_provisional("gpt", view(), None, held)) == [(5, PROVISIONAL)]


def test_with_a_registry_it_says_what_is_committed_and_nodes_add_what_is_newer():
    listed = [rpb.StepSummary(step=5, state=COMMITTED), rpb.StepSummary(step=6, state=REPLICATING)]
    held = {"b": [replica(4), replica(5), replica(6), replica(7), replica(8, provisional=False)]}
    found = with_provisional("gpt", view(), listed, held)
    assert shown(found) == [(5, COMMITTED), (6, PROVISIONAL), (7, PROVISIONAL)]


def test_a_job_with_provisional_steps_is_degraded_until_one_is_committed():
    held = {"b": [replica(6), replica(7)]}
    (code,) = provisional_codes(view(5), held)
    assert code.code == "PROVISIONAL" and "6, 7" in code.detail and code.remedy
    assert provisional_codes(view(7), held) == []
