"""Lost copies come back by themselves with no trainer there; drained nodes may be stopped; bad bytes are found."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from tests.cluster.harness import (
    Job,
    chunks_on_disk,
    counters,
    flip_byte,
    process_of,
    replicas_on_disk,
    until,
)

from fastcheck.admin import AdminClient
from fastcheck.local import LocalCluster, layout
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheckd.config_sources import load_config
from fastcheckd.counters import Counters
from fastcheckd.registry.client import RegistryClient

Make = Callable[..., LocalCluster]


def ask(cluster: LocalCluster, method: str, request: Any) -> Any:
    """One call of the registry, as a daemon makes it."""
    config = load_config(layout.node_dir(cluster.dir, "node-0") / "config.yaml")

    async def whole() -> Any:
        client = RegistryClient(config, Counters())
        try:
            return await getattr(client, method)(request, timeout_s=20)
        finally:
            await client.close()

    return asyncio.run(whole())


def redundancy(cluster: LocalCluster) -> rpb.GetRedundancyResponse:
    found: rpb.GetRedundancyResponse = ask(cluster, "get_redundancy", rpb.GetRedundancyRequest())
    return found


def until_whole(cluster: LocalCluster) -> rpb.GetRedundancyResponse:
    """Wait until no committed shard is short of copies, and nothing is being repaired."""

    def whole() -> rpb.GetRedundancyResponse | None:
        found = redundancy(cluster)
        return None if found.short_shards or found.repairing else found

    found: rpb.GetRedundancyResponse = until(whole, "all copies to be there")
    return found


def until_short(cluster: LocalCluster) -> None:
    until(lambda: redundancy(cluster).short_shards, "the loss to be noticed")


def replicas(cluster: LocalCluster, ask_node: str, job: str = "gpt") -> list[dict[str, Any]]:
    """Every shard, with the nodes that really have it, whose bytes have the committed digest."""
    with AdminClient(cluster.address(ask_node), timeout_s=10) as admin:
        found: list[dict[str, Any]] = admin.replicas(job)["replicas"]
    return found


def having(row: dict[str, Any]) -> set[str]:
    return set(row["holders"]) | ({row["owner"]} if row["owner_holds"] else set())


def until_copies(cluster: LocalCluster, ask_node: str, job: str = "gpt") -> None:
    """Wait until two nodes really have every shard."""
    until(
        lambda: all(len(having(row)) >= 2 for row in replicas(cluster, ask_node, job)),
        "two good copies of all",
    )


def first_holder(cluster: LocalCluster, owner: str) -> str:
    """A node that holds something of what the owner saved, other than the one that the tests ask."""
    return max(str(holder) for row in replicas(cluster, owner) for holder in row["holders"])


def test_copies_of_a_lost_holder_are_made_anew_without_a_trainer_and_survive_the_next_loss(
    make_cluster: Make,
) -> None:
    cluster = make_cluster(5)
    job = Job(cluster, ["node-4"], megabytes=4)  # no voter, as all others that are to be lost but one
    job.commit(1)
    job.commit(2)
    job.stop()  # nobody is left that could save, load or send anything
    victim = first_holder(cluster, "node-4")
    held = {(row["step"], row["shard"]) for row in replicas(cluster, "node-0") if victim in row["holders"]}
    assert held
    cluster.kill(victim, wipe=True)
    until_short(cluster)
    found = until_whole(cluster)
    assert found.repaired >= len(held)
    rows = replicas(cluster, "node-0")
    assert {row["step"] for row in rows} == {1, 2}
    for row in rows:
        assert victim not in having(row) and len(having(row)) >= 2
    # The owner goes as well: the copies that were made are good for all of it.
    cluster.kill("node-4", wipe=True)
    job.start(["node-0"])
    assert job.load() == 2


def test_a_node_that_returns_with_its_memory_has_its_copies_again_without_a_byte_sent(
    make_cluster: Make,
) -> None:
    cluster = make_cluster(2)  # nobody else could take a copy meanwhile
    job = Job(cluster, ["node-0"], megabytes=4)
    job.commit(1)
    job.stop()
    cluster.kill("node-1")
    cluster.start("node-1")
    until(lambda: counters(cluster, "node-1")["inventory_reported"], "the node to say what it has")
    until_whole(cluster)
    assert all(row["holders"] == row["placed"] == ["node-1"] for row in replicas(cluster, "node-0"))
    assert all(counters(cluster, node)["repair_bytes"] == 0 for node in ("node-0", "node-1"))
    assert redundancy(cluster).repaired == 0


def test_the_owner_returns_with_its_memory_and_counts_again(make_cluster: Make) -> None:
    cluster = make_cluster(2)
    job = Job(cluster, ["node-1"], megabytes=4)
    job.commit(1)
    job.stop()
    cluster.kill("node-1")
    until_short(cluster)
    cluster.start("node-1")
    until_whole(cluster)
    assert all(counters(cluster, node)["repair_bytes"] == 0 for node in ("node-0", "node-1"))
    assert all(row["owner_holds"] for row in replicas(cluster, "node-0"))


def test_a_node_that_returns_empty_is_filled_again(make_cluster: Make) -> None:
    cluster = make_cluster(3)
    job = Job(cluster, ["node-0"], megabytes=4)
    job.commit(1)
    job.stop()
    victim = next(
        n for n in ("node-1", "node-2") if any(n in r["holders"] for r in replicas(cluster, "node-0"))
    )
    other = "node-2" if victim == "node-1" else "node-1"
    cluster.kill(other, wipe=True)  # so that there is nobody else
    cluster.kill(victim, wipe=True)
    cluster.start(victim)
    until_short(cluster)
    until_whole(cluster)
    for row in replicas(cluster, "node-0"):
        assert having(row) == {"node-0", victim}
    assert counters(cluster, victim)["replicas_repaired"] == len(replicas(cluster, "node-0"))


def test_a_drained_node_can_be_stopped_for_good(make_cluster: Make) -> None:
    cluster = make_cluster(5)
    job = Job(cluster, ["node-0", "node-4"], megabytes=4)
    job.commit(1)
    job.stop()
    verdict = ask(cluster, "safe_to_stop", rpb.SafeToStopRequest(node_id="node-4"))
    assert not verdict.safe and verdict.survivable
    assert verdict.jobs == ["gpt"] and "fewer than 2 copies" in verdict.reasons[0]
    ask(cluster, "set_draining", rpb.SetDrainingRequest(node_id="node-4", draining=True))

    def safe() -> bool:
        return bool(ask(cluster, "safe_to_stop", rpb.SafeToStopRequest(node_id="node-4")).safe)

    until(safe, "the node to be safe to stop")
    for row in replicas(cluster, "node-0"):
        assert len(having(row) - {"node-4"}) >= 2
        assert "node-4" not in row["placed"]
    cluster.kill("node-4", wipe=True)
    job.start(["node-0", "node-1"])
    assert job.load() == 1


def flip(cluster: LocalCluster, node: str) -> None:
    """One byte of every replica of a node changes while nobody looks."""
    for manifest in replicas_on_disk(cluster, node):
        path, offset, _ = chunks_on_disk(manifest)[0]
        flip_byte(path, offset)


def test_a_byte_that_flips_at_rest_is_found_and_repaired(make_cluster: Make) -> None:
    cluster = make_cluster(4, scrub_period_s=10)
    job = Job(cluster, ["node-0"], megabytes=1)
    job.commit(1)
    job.stop()
    victim = first_holder(cluster, "node-0")
    flip(cluster, victim)
    until(lambda: counters(cluster, victim)["corrupt_found"], "the scrub to find it", 100)
    until_copies(cluster, "node-0")
    assert sum(counters(cluster, f"node-{i}")["replicas_repaired"] for i in range(4)) >= 1


def test_what_a_restarted_data_process_finds_bad_is_repaired(make_cluster: Make) -> None:
    cluster = make_cluster(4)
    job = Job(cluster, ["node-0"], megabytes=1)
    job.commit(1)
    job.stop()
    victim = first_holder(cluster, "node-0")
    flip(cluster, victim)
    process_of(cluster, victim, "data").kill()  # its life goes on, and what it took over is checked first

    def found() -> int:
        with contextlib.suppress(KeyError):  # the process does not answer yet
            return counters(cluster, victim)["corrupt_found"]
        return 0

    until(found, "the bad replica to be found")
    until_copies(cluster, "node-0")


def test_a_node_that_is_killed_while_it_copies_from_the_first_holder_is_replaced(make_cluster: Make) -> None:
    """The owner is lost, so the first holder is the only source, and nobody may wait for the second one."""
    cluster = make_cluster(5, chunk_bytes=65536, repair_bytes_per_s=1 << 20, codec="never", spread=1)
    job = Job(cluster, ["node-4"], megabytes=4)
    job.commit(1)
    job.stop()
    first = first_holder(cluster, "node-4")
    others = [node for node in cluster.node_ids if node not in {"node-4", first}]
    cluster.kill("node-4", wipe=True)

    def copying() -> str | None:
        return next((node for node in others if counters(cluster, node)["bytes_received"]), None)

    second = until(copying, "a node to copy from the first holder")
    assert not counters(cluster, second)["replicas_repaired"], "it is in the middle of it"
    cluster.kill(second, wipe=True)
    until_copies(cluster, first)
    assert {node for row in replicas(cluster, first) for node in having(row)} <= {*others, first} - {second}
    job.start([first])
    assert job.load() == 1


def test_repair_lets_a_save_go_first(make_cluster: Make) -> None:
    cluster = make_cluster(3, chunk_bytes=65536, repair_bytes_per_s=1 << 20, codec="never")
    big = Job(cluster, ["node-0"], name="big", megabytes=16)
    big.commit(1)
    big.stop()
    victim = next(
        n for n in ("node-1", "node-2") if any(n in r["holders"] for r in replicas(cluster, "node-0", "big"))
    )
    target = "node-2" if victim == "node-1" else "node-1"
    small = Job(cluster, [target], name="small", megabytes=1)
    small.commit(1)
    cluster.kill(victim, wipe=True)
    until(lambda: redundancy(cluster).repairing, "the repair to begin")
    step = 2
    while not counters(cluster, target)["repair_pauses"]:
        small.commit(step)  # each of them is done although the repair goes on
        step += 1
        assert step < 500
    small.stop()
    until(
        lambda: not [r for r in replicas(cluster, "node-0", "big") if len(having(r)) < 2],
        "the repair to end",
        100,
    )
