"""What an operator is told about further losses."""

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.services.admin_reports import NODES_MAX, survival

UP, DOWN = rpb.NODE_STATE_UP, rpb.NODE_STATE_DOWN


def view(**states):
    return rpb.ClusterView(
        nodes=[rpb.NodeRecord(node_id=n, incarnation=1, state=state) for n, state in states.items()]
    )


def step(*shards):
    """Each shard: its owner's name, then those of its holders."""
    ranks = [
        rpb.RankRecord(
            rank=rank,
            owner=pb.NodeRef(node_id=owner),
            shards=[rpb.ShardRecord(holders=[pb.NodeRef(node_id=h) for h in holders])],
        )
        for rank, (owner, *holders) in enumerate(shards)
    ]
    return rpb.StepRecord(job="gpt", step=1, ranks=ranks)


def told(found):
    return [(each.losses, round(each.probability, 6)) for each in found]


def test_pairs_of_four_nodes_survive_two_losses_in_four_of_six_cases():
    four = view(a=UP, b=UP, c=UP, d=UP)
    assert told(survival(four, [step("ab", "ba", "cd", "dc")])) == [(2, round(4 / 6, 6)), (3, 0.0)]


def test_who_is_down_counts_no_more_and_one_further_loss_can_be_fatal():
    seen = view(a=UP, b=DOWN, c=UP, d=UP)
    assert told(survival(seen, [step("ab", "cd")])) == [(1, round(2 / 3, 6)), (2, 0.0)]


def test_nothing_is_said_of_nothing_of_what_is_lost_and_of_what_takes_too_long():
    assert survival(view(a=UP, b=UP), []) == []
    assert survival(view(a=DOWN, b=DOWN, c=UP), [step("ab")]) == []
    crowd = view(**{f"n{i}": UP for i in range(NODES_MAX + 1)})
    assert survival(crowd, [step(["n0", "n1"])]) == []
