"""What is wrong with the cluster and what to do about it, decided from what the registry and the nodes said. Pure.

A code is a stable word with a severity. CRITICAL: nothing is committed, or committed bytes are gone. DEGRADED:
all is there, and less than wanted would survive. OK: worth knowing, and no reason to wake anybody; such a code
does not change the health. Everything that somebody asked for (a drain) and all that has mended itself is OK.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fastcheck_proto.v1 import admin_pb2, node_pb2, peer_pb2, registry_pb2

from ..config import Config, Voter, is_loopback, split_address
from .admin_reports import Answers
from .health_of_jobs import copy_codes, save_codes

#: A node above this share of its budget soon refuses saves: the codes warn before that happens.
MEMORY_NEAR_FULL_SHARE = 0.9
#: A replica that waits for its check this many periods is late; one is what it may take.
SCRUB_LATE_PERIODS = 2
#: How the registry begins the reason of a node that gets nothing for a while because it keeps coming back.
DAMPED = "damped"
#: A certificate should be replaced before so little of it is left; of short-lived ones, before a fifth of their life.
CERT_EXPIRING_S = 7 * 86400
CERT_EXPIRING_SHARE = 0.2

OK, DEGRADED, CRITICAL = admin_pb2.HEALTH_OK, admin_pb2.HEALTH_DEGRADED, admin_pb2.HEALTH_CRITICAL

_STATE_WORDS: dict[int, str] = {
    registry_pb2.NODE_STATE_UP: "UP",
    registry_pb2.NODE_STATE_SUSPECT: "SUSPECT",
    registry_pb2.NODE_STATE_DOWN: "DOWN",
    registry_pb2.NODE_STATE_DRAINING: "DRAINING",
}


def health_codes(
    view: registry_pb2.ClusterView, answers: Answers, config: Config, *, has_quorum: bool, now_ms: int = 0
) -> list[admin_pb2.HealthCode]:
    """Everything that is wrong or worth knowing, the worst first.

    Args:
        view: the members as the registry last said.
        config: of the node that answers.
        has_quorum: whether the registry answers for what it decides.
        now_ms: the wall clock, to say how long ago something was.
    """
    codes = [*_registry_codes(view, config, has_quorum=has_quorum)]
    for node in sorted(view.nodes, key=lambda n: n.node_id):
        codes.extend(_node_codes(node, answers, config))
    codes.extend(copy_codes(view, answers))
    if has_quorum:  # without one nothing is committed, and that is said above
        codes.extend(save_codes(view, answers, now_ms))
    return sorted(codes, key=lambda c: -c.severity)


def worst(codes: Iterable[admin_pb2.HealthCode]) -> admin_pb2.Health.ValueType:
    """The cluster's health: that of the worst code, OK when there is none."""
    return max((code.severity for code in codes), default=OK)


def _registry_codes(
    view: registry_pb2.ClusterView, config: Config, *, has_quorum: bool
) -> Iterator[admin_pb2.HealthCode]:
    if not has_quorum:
        yield admin_pb2.HealthCode(
            code="NO_QUORUM",
            severity=CRITICAL,
            detail="the registry has no leader that can commit "
            f"(voters: {', '.join(view.voters) or 'not known'}); no step is committed",
            remedy="bring back a majority of the voters; training goes on, and steps commit afterwards. "
            "If a majority is gone for good: docs/operating/quorum-lost.md",
        )
    down = {node.node_id for node in view.nodes if node.state == registry_pb2.NODE_STATE_DOWN}
    gone = sorted(down & {*view.voters})
    left = len(view.voters) - len(gone)
    if has_quorum and gone and left - 1 < len(view.voters) // 2 + 1:
        yield admin_pb2.HealthCode(
            code="QUORUM_THIN",
            severity=DEGRADED,
            detail=f"of {len(view.voters)} voters {', '.join(gone)} {'is' if len(gone) == 1 else 'are'} DOWN: "
            "if one more is lost, nothing is committed any more",
            remedy=f"start fastcheckd on {gone[0]} again; if it is gone for good: "
            f"fastcheck voters replace {gone[0]} NEW",
        )
    known = _addresses(view.voter_records)
    configured = _addresses(config.effective_voters)
    if known and known != configured:
        yield admin_pb2.HealthCode(
            code="VOTERS_DIFFER",
            severity=OK,
            detail=f"the registry's voters are {_pairs(known)}, those in this node's config {_pairs(configured)}",
            remedy="write the registry's voters into the config key 'voters' of every node; nodes that were "
            "there follow the registry meanwhile, a node with an empty state_dir cannot",
        )
    yield from _exposure_codes(config)
    loopback = all(is_loopback(split_address(v.raft_address)[0]) for v in config.effective_voters)
    if len(view.voters) > 1 and config.tls_cert_file is None and not loopback:
        yield admin_pb2.HealthCode(
            code="RAFT_SHARED_KEY",
            severity=OK,
            detail="voters know each other by one shared key: whoever has it can speak as any of them",
            remedy="set tls_cert_file, tls_key_file and tls_ca_file on every voter",
        )


def _exposure_codes(config: Config) -> Iterator[admin_pb2.HealthCode]:
    if config.exposed and config.tls_cert_file is None:
        yield admin_pb2.HealthCode(
            code="INSECURE",
            severity=OK,
            detail=f"insecure: true: whoever reaches {', '.join(config.exposed)} can read, replace and delete every "
            "checkpoint",
            remedy="set tls_cert_file, tls_key_file and tls_ca_file on every node (docs/security.md)",
        )
    if config.tls_cert_file and not config.lane_tls and not is_loopback(config.effective_lane_host):
        yield admin_pb2.HealthCode(
            code="LANE_READABLE",
            severity=OK,
            detail="shards travel between nodes without encryption: whoever sees that network reads them",
            remedy="set lane_tls: true on every node, unless the lane's network is the cluster's own",
        )


def _addresses(voters: Iterable[Voter | node_pb2.VoterRecord]) -> frozenset[tuple[str, str, str]]:
    return frozenset((v.node_id, v.registry_address, v.raft_address) for v in voters)


def _pairs(voters: Iterable[tuple[str, str, str]]) -> str:
    return ", ".join(f"{node_id} at {raft}" for node_id, _, raft in sorted(voters))


def _node_codes(
    node: registry_pb2.NodeRecord, answers: Answers, config: Config
) -> Iterator[admin_pb2.HealthCode]:
    name = f"{node.node_id} (a registry voter)" if node.voter else node.node_id
    why = f": {node.reason}" if node.reason else ""
    if node.state == registry_pb2.NODE_STATE_DOWN:
        yield admin_pb2.HealthCode(
            code="NODE_DOWN",
            severity=DEGRADED,
            detail=f"{name} is DOWN{why}",
            remedy=f"start fastcheckd on {node.node_id} again, or replace the machine under the same node_id; "
            f"if it will not come back: fastcheck forget {node.node_id}",
        )
        return
    if node.reason.startswith(DAMPED):
        yield admin_pb2.HealthCode(
            code="NODE_FLAPPING",
            severity=DEGRADED,
            detail=f"{name} comes and goes and gets nothing new for a while{why}",
            remedy=f"see 'fastcheck history {node.node_id}'; look at its log, its memory and its network",
        )
    elif node.state == registry_pb2.NODE_STATE_SUSPECT:
        yield admin_pb2.HealthCode(
            code="NODE_SUSPECT",
            severity=DEGRADED,
            detail=f"{name} is suspected{why or ': it has not been heard of lately'}",
            remedy=f"look at the load and the network of {node.node_id}; it is either UP again or DOWN soon",
        )
    elif node.state == registry_pb2.NODE_STATE_DRAINING:
        yield admin_pb2.HealthCode(
            code="NODE_DRAINING",
            severity=OK,
            detail=f"{name} is being drained: it gets nothing new, its copies are made elsewhere",
            remedy=f"wait for 'fastcheck safe-to-stop {node.node_id}', or: "
            f"fastcheck drain {node.node_id} --undo",
        )
    if node.trouble:
        yield admin_pb2.HealthCode(
            code="PROCESS_FAILING",
            severity=DEGRADED,
            detail=f"on {name} {node.trouble}",
            remedy=f"look at the log of {node.node_id} and at the limits that its processes have (pids.max, memory, "
            "open files); its agent tries again every few seconds",
        )
    yield from _data_codes(node, name, answers.stats.get(node.node_id), config)


def _data_codes(
    node: registry_pb2.NodeRecord, name: str, stats: peer_pb2.GetStatsResponse | None, config: Config
) -> Iterator[admin_pb2.HealthCode]:
    if node.data == registry_pb2.DATA_HEALTH_HUNG:
        yield admin_pb2.HealthCode(
            code="DATA_HUNG",
            severity=DEGRADED,
            detail=f"the data process of {name} is there and makes no progress",
            remedy=f"restart fastcheckd on {node.node_id}; what it holds is adopted",
        )
    elif stats is None:
        state = _STATE_WORDS.get(node.state, "in an unknown state")
        yield admin_pb2.HealthCode(
            code="DATA_UNREACHABLE",
            severity=DEGRADED,
            detail=f"the data process of {name} at {node.data_address} did not answer, "
            f"while the registry holds it {state}",
            remedy=f"look at the fastcheckd log of {node.node_id} and at the network between the nodes",
        )
    used = stats.ram_used_bytes if stats else node.ram_used_bytes
    budget = stats.ram_budget_bytes if stats else node.ram_budget_bytes
    if budget and used > MEMORY_NEAR_FULL_SHARE * budget:
        yield admin_pb2.HealthCode(
            code="MEMORY_NEAR_FULL",
            severity=DEGRADED,
            detail=f"{name} uses {used} of its {budget} bytes ({100 * used // budget} %)",
            remedy="raise ram_budget_bytes, lower keep_steps or max_in_flight, or add nodes",
        )
    if stats is None:
        return
    for job in stats.jobs:
        if stats.job_budget_bytes and job.ram_used_bytes > MEMORY_NEAR_FULL_SHARE * stats.job_budget_bytes:
            yield admin_pb2.HealthCode(
                code="JOB_NEAR_BUDGET",
                severity=OK,
                detail=f"job {job.job} has {job.ram_used_bytes} of the {stats.job_budget_bytes} bytes that one job "
                f"may have on {name} ({100 * job.ram_used_bytes // stats.job_budget_bytes} %); more is refused",
                remedy="raise job_budget_bytes, lower keep_steps or max_in_flight, or spread the job over more nodes",
            )
    if stats.lane.faster_interface:
        yield admin_pb2.HealthCode(
            code="LANE_SLOW_INTERFACE",
            severity=OK,
            detail=f"the lane of {name} goes over {stats.lane.interface} ({stats.lane.speed_mbit_per_s} Mbit/s), while "
            f"{stats.lane.faster_interface} ({stats.lane.faster_mbit_per_s} Mbit/s) is up as well",
            remedy=f"set lane_host: {stats.lane.faster_interface} on {node.node_id}, if the other nodes can be "
            "reached there, and restart fastcheckd",
        )
    yield from _certificate_codes(node, name, stats)
    late_ms = SCRUB_LATE_PERIODS * config.scrub_period_s * 1000
    if stats.HasField("scrub_age_ms") and stats.scrub_age_ms > late_ms:
        yield admin_pb2.HealthCode(
            code="SCRUB_LATE",
            severity=DEGRADED,
            detail=f"a replica on {name} was last checked {stats.scrub_age_ms // 1000} s ago; "
            f"every {config.scrub_period_s:g} s is wanted",
            remedy=f"look at the load of {node.node_id}: checking waits for saves; or raise scrub_period_s",
        )
    if corrupt := stats.counters.get("corrupt_found", 0):
        yield admin_pb2.HealthCode(
            code="CORRUPT_FOUND",
            severity=OK,
            detail=f"{name} found {corrupt} bad replica(s) since it started, and dropped them",
            remedy=f"if it happens again, test the memory of {node.node_id}",
        )


def _certificate_codes(
    node: registry_pb2.NodeRecord, name: str, stats: peer_pb2.GetStatsResponse
) -> Iterator[admin_pb2.HealthCode]:
    left_s, whole_s = stats.certificate.seconds_left, stats.certificate.lifetime_seconds
    if not stats.HasField("certificate") or left_s >= min(CERT_EXPIRING_S, CERT_EXPIRING_SHARE * whole_s):
        return
    when = f"expires in {left_s / 3600:.1f} h" if left_s >= 0 else f"expired {-left_s / 3600:.1f} h ago"
    yield admin_pb2.HealthCode(
        code="CERT_EXPIRING",
        severity=DEGRADED,
        detail=f"the certificate of {name} {when}; then nobody connects to it any more",
        remedy=f"replace the files of tls_cert_file and tls_key_file on {node.node_id}; it needs no restart",
    )
