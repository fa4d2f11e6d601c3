"""The lane's network is the one that was chosen: peers are told, connections come from it, a wrong one is refused."""

from tests.cluster.harness import Job, counters, process_of, run_module, until

from fastcheck.admin import AdminClient

MB = 1_000_000


def test_the_lane_listens_on_and_connects_from_the_chosen_address(make_cluster):
    cluster = make_cluster(
        2, lane_host="127.0.0.9", replicate_bytes_per_s=4 * MB, chunk_bytes=262144, codec="never"
    )
    job = Job(cluster, ["node-0"], megabytes=24)
    (handle,) = job.save(1)
    data = process_of(cluster, "node-1", "data")
    with AdminClient(cluster.address("node-0"), timeout_s=5) as admin:
        nodes = {n["node_id"]: n for n in admin.nodes()["nodes"]}
    lanes = {node_id: node["lane_address"] for node_id, node in nodes.items()}
    assert all(address.startswith("127.0.0.9:") for address in lanes.values())
    assert nodes["node-0"]["lane"]["interface"] == "lo"
    assert nodes["node-0"]["address"].startswith("127.0.0.1:")
    port = int(lanes["node-0"].rpartition(":")[2])

    def reading():
        return [c.laddr.ip for c in data.net_connections("tcp") if c.raddr and c.raddr.port == port]

    assert set(until(reading, "connections to the owner's lane")) == {"127.0.0.9"}
    handle.result(timeout=60)
    assert counters(cluster, "node-1")["shards_received"] > 0


def test_an_address_of_another_machine_is_refused_at_the_start_with_what_there_is():
    done = run_module("fastcheckd", "run", "--set", "lane_host=203.0.113.7")
    assert done.returncode == 78
    assert "lane_host" in done.stderr and "not of this machine" in done.stderr
    assert "lo (127.0.0.1" in done.stderr
