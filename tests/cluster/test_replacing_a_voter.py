"""Machines of voters that are gone for good, and what the cluster does after somebody says so."""

import asyncio
import contextlib
import json
import shutil
from pathlib import Path

from tests.cluster.registry_actors import eventually
from tests.cluster.registry_process import free_ports

from fastcheck.local import LocalCluster, layout
from fastcheck_proto.v1 import common_pb2, registry_pb2
from fastcheckd.config_sources import load_config
from fastcheckd.counters import Counters
from fastcheckd.errors import FastCheckdError, FencedError
from fastcheckd.registry.client import RegistryClient
from fastcheckd.registry.known_voters import with_remembered_voters

UP = registry_pb2.NODE_STATE_UP


def config_of(cluster: LocalCluster, node_id: str):
    return load_config(layout.node_dir(cluster.dir, node_id) / "config.yaml")


@contextlib.asynccontextmanager
async def client_of(cluster: LocalCluster, node_id: str):
    client = RegistryClient(with_remembered_voters(config_of(cluster, node_id)), Counters())
    try:
        yield client
    finally:
        await client.close()


async def commit(client: RegistryClient, node_id: str, name: str, timeout_s: float = 20) -> int:
    """Something that is committed: a seat in a job, taken by a node of the cluster."""

    async def taken():
        view = await client.view(timeout_s)
        node = next(n for n in view.nodes if n.node_id == node_id)
        ref = common_pb2.NodeRef(node_id=node_id, incarnation=node.incarnation)
        request = registry_pb2.OpenRankRequest(job="job", rank=0, world_size=1, client_id=name, node=ref)
        try:
            return (await client.open_rank(request, timeout_s=timeout_s)).session
        except FencedError:  # it was just started, and has yet to register
            return None

    return await eventually(taken, timeout_s)


async def leader_of(client: RegistryClient) -> str:
    async def known():
        with contextlib.suppress(FastCheckdError):
            view = await client.view(5)
            return view.leader if view.has_leader else None

    return await eventually(known, 30)


async def until_state(client: RegistryClient, node_id: str, state: int) -> None:
    async def so():
        view = await client.view(10)
        return any(n.node_id == node_id and n.state == state for n in view.nodes)

    await eventually(so, 30, f"{node_id} in state {state}")


def voters_of(cluster: LocalCluster, node_id: str) -> set[str]:
    """The voters that a node remembers."""
    return {v.node_id for v in with_remembered_voters(config_of(cluster, node_id)).effective_voters}


async def replace(client: RegistryClient, old: str, new: str, ports: list[int] | None = None) -> set[str]:
    ports = ports or free_ports(2)
    request = registry_pb2.ReplaceVoterRequest(
        old_node_id=old,
        new_node_id=new,
        registry_address=f"127.0.0.1:{ports[0]}",
        raft_address=f"127.0.0.1:{ports[1]}",
    )
    response = await client.replace_voter(request, timeout_s=60)
    return {voter.node_id for voter in response.voters}


def lose_machine(cluster: LocalCluster, node_id: str) -> None:
    """Everything of it is gone but the config, which its replacement or its ghost would have."""
    cluster.kill(node_id, wipe=True)
    shutil.rmtree(config_of(cluster, node_id).state_dir)


def test_a_voters_machine_is_lost_and_another_node_votes_in_its_place(make_cluster):
    cluster = make_cluster(4)
    voters, spare = set(cluster.node_ids[:3]), cluster.node_ids[3]

    async def scenario():
        async with client_of(cluster, spare) as client:
            assert await commit(client, spare, "before") == 1
            leader = await leader_of(client)
            lost = next(n for n in cluster.node_ids[:3] if n != leader)
            lose_machine(cluster, lost)
            await until_state(client, lost, registry_pb2.NODE_STATE_DOWN)
            after = (voters - {lost}) | {spare}
            ports = free_ports(2)
            assert await replace(client, lost, spare, ports) == after
            assert await replace(client, lost, spare, ports) == after, "said again, it is done"
            assert await commit(client, spare, "one") == 2
            for node_id in after:
                await eventually(lambda node_id=node_id: voters_of(cluster, node_id) == after)
            view = await client.view(10)
            assert {v.node_id for v in view.voter_records} == after
            client.use_voters(view.voter_records)

            # The lost machine's ghost, with the config of the first day and an empty disk, votes for nobody.
            cluster.start(lost)
            await until_state(client, lost, UP)
            await eventually(lambda: voters_of(cluster, lost) == after)
            await eventually(
                lambda: "this node's registry process stops" in cluster.log_file(lost).read_text()
            )
            assert await commit(client, spare, "two") == 3

            # Another of the first voters goes: the new one makes the majority. This time it is the leader.
            leader = await leader_of(client)
            first = leader if leader != spare else next(iter(after - {spare}))
            cluster.kill(first)
            assert await commit(client, spare, "three", timeout_s=40) == 4
            await until_state(client, first, registry_pb2.NODE_STATE_DOWN)
            cluster.start(first)

            # Everything stops; everything comes back, each with its config of the first day.
            for node_id in cluster.node_ids:
                cluster.kill(node_id)
            for node_id in cluster.node_ids:
                cluster._spawn(node_id)
            assert await commit(client, spare, "four", timeout_s=60) == 5
            view = await client.view(10)
            assert {v.node_id for v in view.voter_records} == after
            assert "registry" not in "".join(running(cluster, lost))

    asyncio.run(scenario())


def running(cluster: LocalCluster, node_id: str) -> list[str]:
    """Which processes of a node run, by their names."""
    found = []
    for pid in cluster.pids(node_id):
        with contextlib.suppress(FileNotFoundError):
            found.append(Path(f"/proc/{pid}/comm").read_text().strip())
    return found


def test_a_voter_that_lost_its_log_votes_again_under_another_address(make_cluster):
    cluster = make_cluster(3)

    async def scenario():
        async with client_of(cluster, "node-0") as client:
            leader = await leader_of(client)
            hurt = next(n for n in cluster.node_ids if n != leader)
            cluster.kill(hurt)
            (config_of(cluster, hurt).state_dir / "registry" / "log").unlink()
            cluster.start(hurt)
            assert "this node votes no more" in cluster.log_file(hurt).read_text()
            assert "fcheck-registry" not in running(cluster, hurt)
            assert await replace(client, hurt, hurt) == set(cluster.node_ids)
            assert "fcheck-registry" in running(cluster, hurt)
            marker = json.loads((config_of(cluster, hurt).state_dir / "registry" / "VOTER").read_bytes())
            records = (await client.view(10)).voter_records
            assert {v.raft_address for v in records if v.node_id == hurt} == {marker["raft_address"]}
            client.use_voters(records)
            cluster.kill(leader)
            assert await commit(client, hurt, "after", timeout_s=40) == 1

    asyncio.run(scenario())
