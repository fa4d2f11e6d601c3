"""A state that all ranks hold alike: each sends a part, any number loads it, and ranks that differ do not commit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.cluster.harness import DEADLINE_S, counters, until

from fastcheck import Checkpointer, ReplicasDisagreeError, SaveFailedError, SaveHandle
from fastcheck.admin import AdminClient
from fastcheck.local import LocalCluster

NODES = ["node-0", "node-1", "node-2", "node-3"]
MEGABYTES = 16


def training_state(step: int, rank: int, megabytes: float = MEGABYTES) -> dict[str, Any]:
    """What every rank holds alike follows from the step; the rest from the rank too."""
    generator = torch.Generator().manual_seed(1000 + step)
    count = int(megabytes * 262144) // 16
    return {
        "model": {f"layer{i}": torch.randn(count, generator=generator) for i in range(16)},
        "step": step,
        "rng": torch.full((5,), step * 100 + rank, dtype=torch.uint8 if step < 2 else torch.int64),
        "position": step * 100 + rank,
    }


def empty_state(step: int) -> dict[str, Any]:
    return {
        "model": {name: torch.zeros_like(t) for name, t in training_state(step, 0)["model"].items()},
        "step": -1,
        "rng": torch.zeros_like(training_state(step, 0)["rng"]),
        "position": -1,
    }


class Ranks:
    """Trainers of one data-parallel job."""

    def __init__(self, cluster: LocalCluster, job: str, nodes: list[str], **options: Any) -> None:
        self.cluster = cluster
        self.job = job
        self.nodes = nodes
        self.options = options
        self.ckpts: list[Checkpointer] = []
        self.start(nodes)

    def start(self, nodes: list[str]) -> None:
        """All trainers anew, perhaps elsewhere, perhaps more or fewer."""
        self.stop()
        self.nodes = nodes
        self.ckpts = [
            Checkpointer(
                self.job,
                rank=rank,
                world_size=len(nodes),
                address=self.cluster.address(node),
                **({"replicated": True, "per_rank": ("rng",)} | self.options),
            )
            for rank, node in enumerate(nodes)
        ]

    def stop(self) -> None:
        for ckpt in self.ckpts:
            ckpt.close()
        self.ckpts = []

    def save(self, step: int, change: dict[int, Any] | None = None) -> list[SaveHandle]:
        """Every rank saves; those in `change` hold a state that was changed by it."""
        states = [training_state(step, rank) for rank in range(len(self.ckpts))]
        for rank, spoil in (change or {}).items():
            spoil(states[rank])
        return [ckpt.save(step, state) for ckpt, state in zip(self.ckpts, states, strict=True)]

    def commit(self, step: int) -> list[SaveHandle]:
        handles = self.save(step)
        for handle in handles:
            handle.result(timeout=DEADLINE_S)
        return handles

    def load(self, step: int, saved_by: int) -> None:
        """Every rank loads at once; all have that step, bit for bit, and what is their own."""

        def one(ckpt: Checkpointer) -> dict[str, Any]:
            state = empty_state(step)
            assert ckpt.load(state) == step
            return state

        with ThreadPoolExecutor(len(self.ckpts)) as pool:
            found = list(pool.map(one, self.ckpts))
        for rank, state in enumerate(found):
            own = rank if rank < saved_by else 0
            wanted = training_state(step, own)
            for name, tensor in wanted["model"].items():
                assert torch.equal(state["model"][name].view(torch.int32), tensor.view(torch.int32)), name
            assert torch.equal(state["rng"], wanted["rng"])
            assert (state["step"], state["position"]) == (step, wanted["position"])
            assert self.ckpts[rank].loaded_own == (rank < saved_by)


@pytest.fixture
def ranks_of(request):
    started: list[Ranks] = []

    def start(cluster: LocalCluster, nodes: list[str], **options: Any) -> Ranks:
        started.append(Ranks(cluster, request.node.name, nodes, **options))
        return started[-1]

    yield start
    for ranks in started:
        ranks.stop()


def test_four_ranks_send_a_quarter_each_and_any_number_of_ranks_loads_it(make_cluster, ranks_of):
    cluster = make_cluster(5)
    ranks = ranks_of(cluster, NODES)
    handles = ranks.commit(1)
    for handle in handles:
        assert handle.stats["bytes"] == pytest.approx(MEGABYTES / 4 * 1048576, rel=0.3)
        assert handle.stats["encoded_bytes"] < MEGABYTES / 3 * 1048576
    ranks.commit(2)
    ranks.start(NODES)
    ranks.load(2, saved_by=4)
    ranks.commit(3)

    cluster.kill("node-1", wipe=True)
    ranks.start(["node-0", "node-4", "node-2", "node-3"])
    ranks.load(3, saved_by=4)

    ranks.start(["node-0", "node-4", "node-2", "node-3", "node-4"])
    ranks.load(3, saved_by=4)
    ranks.commit(4)
    ranks.start(["node-2", "node-3"])
    ranks.load(4, saved_by=5)
    ranks.commit(5)
    ranks.load(5, saved_by=2)


def test_a_flipped_bit_is_reported_by_part_and_rank_and_the_next_good_step_commits(make_cluster, ranks_of):
    cluster = make_cluster(4)
    ranks = ranks_of(cluster, NODES)
    ranks.commit(1)

    def flip(state: dict[str, Any]) -> None:
        state["model"]["layer11"].view(torch.int32)[12345] ^= 1 << 9

    handles = ranks.save(2, {2: flip})
    for handle in handles:
        with pytest.raises(ReplicasDisagreeError, match="rank 2 differs from most others in part") as error:
            handle.result(timeout=DEADLINE_S)
        assert (
            list(error.value.parts.values()) == [(2,)] and error.value.ranks == (2,) and error.value.minority
        )
        assert isinstance(error.value, SaveFailedError)
    assert ranks.ckpts[0].steps() == [1]
    assert sum(counters(cluster, node)["replicas_disagreed"] for node in NODES) == 4
    ranks.commit(3)
    ranks.start(NODES)
    ranks.load(3, saved_by=4)


def test_two_ranks_that_disagree_are_both_named(standing_cluster, ranks_of):
    ranks = ranks_of(standing_cluster, NODES[:2])
    for handle in ranks.save(1, {1: lambda state: state["model"]["layer0"].neg_()}):
        with pytest.raises(ReplicasDisagreeError) as error:
            handle.result(timeout=DEADLINE_S)
        assert error.value.parts == {0: (0, 1)} and not error.value.minority
    ranks.commit(2)


def test_in_pairs_what_is_committed_was_seen_alike_by_two_and_a_rank_that_differs_is_found_in_turn(
    standing_cluster, ranks_of
):
    ranks = ranks_of(standing_cluster, NODES[:3], compare="pairs")

    def spoil(state: dict[str, Any]) -> None:
        state["model"]["layer15"][-1] += 1  # in the last part

    found = []
    for step in range(1, 8):
        handles = ranks.save(step, {0: spoil})
        until(lambda now=handles: all(h.done for h in now), f"step {step} to end")
        found.append([type(h.exception()) for h in handles])
    assert all(each in ([type(None)] * 3, [ReplicasDisagreeError] * 3) for each in found)
    assert [ReplicasDisagreeError] * 3 in found
    # Where it is rank 0's turn to look at rank 2's part is all that differs; what was committed is what rank 2 holds.
    if kept := ranks.ckpts[0].steps():
        ranks.start(NODES[:3])
        ranks.load(kept[-1], saved_by=3)


def test_another_model_on_one_rank_is_refused_and_so_is_one_that_does_not_share(standing_cluster, ranks_of):
    ranks = ranks_of(standing_cluster, NODES[:3])

    def grow(state: dict[str, Any]) -> None:
        state["model"]["layer3"] = torch.zeros(17)

    for handle in ranks.save(1, {1: grow}):
        with pytest.raises(ReplicasDisagreeError, match=r"names, dtypes, shapes.*rank 1:"):
            handle.result(timeout=DEADLINE_S)
    ranks.ckpts[2].close()
    ranks.ckpts[2] = Checkpointer(ranks.job, rank=2, world_size=3, address=standing_cluster.address("node-2"))
    for handle in ranks.save(2):
        with pytest.raises(ReplicasDisagreeError, match="rank 2 saved a state of its own"):
            handle.result(timeout=DEADLINE_S)


def test_ranks_of_one_node_share_what_was_fetched_and_a_plain_checkpointer_can_load_it(
    standing_cluster, ranks_of
):
    ranks = ranks_of(standing_cluster, ["node-0"] * 3)
    ranks.commit(1)
    ranks.start(["node-1"] * 3)
    ranks.load(1, saved_by=3)
    with Checkpointer(ranks.job, rank=0, world_size=1, address=standing_cluster.address("node-2")) as plain:
        state = empty_state(1)
        assert plain.load(state) == 1
        assert torch.equal(state["model"]["layer5"], training_state(1, 0)["model"]["layer5"])


def test_trainers_without_a_daemon_of_their_own_save_and_load_parts_through_streams(
    standing_cluster, ranks_of, monkeypatch
):
    with AdminClient(standing_cluster.address("node-0"), timeout_s=5) as admin:
        far = {node["node_id"]: node["address"] for node in admin.nodes()["nodes"]}
    monkeypatch.setattr(standing_cluster, "address", far.__getitem__)
    ranks = ranks_of(standing_cluster, NODES[:2])
    ranks.commit(1)
    ranks.start(NODES[:3])
    ranks.load(1, saved_by=2)


def test_the_operator_sees_that_a_step_is_replicated(standing_cluster, ranks_of):
    ranks = ranks_of(standing_cluster, NODES[:2])
    ranks.commit(1)
    with AdminClient(standing_cluster.address("node-2"), timeout_s=5) as admin:
        assert [step["replicated"] for step in admin.checkpoints(ranks.job)["checkpoints"]] == [True]
        assert admin.inspect(ranks.job, 1)["replicated"]


def test_a_restarted_data_process_still_knows_what_its_rank_found(make_cluster, ranks_of):
    """Rank 0 is replicated and waits for rank 1 when its node's daemon is killed; rank 1 then saves something else."""
    cluster = make_cluster(3)
    ranks = ranks_of(cluster, NODES[:2])
    ranks.commit(1)
    early = ranks.ckpts[0].save(2, training_state(2, 0))
    until(lambda: early.replicated, "rank 0 to be replicated")
    cluster.kill("node-0")
    cluster.start("node-0")
    state = training_state(2, 1)
    state["model"]["layer7"][7] += 1
    late = ranks.ckpts[1].save(2, state)
    for handle in (early, late):
        with pytest.raises(ReplicasDisagreeError) as error:
            handle.result(timeout=DEADLINE_S)
        assert list(error.value.parts.values()) == [(0, 1)]
    ranks.commit(3)
