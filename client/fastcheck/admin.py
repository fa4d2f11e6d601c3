"""The operator's questions in Python: what `fastcheck status`, `nodes`, `replicas` ... print, as plain dicts.

Any node's agent answers for the whole cluster. Everything here is JSON-ready: digests are hex, times are
ISO-8601 in UTC, states are words. No torch and no command line in this module.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, TypeVar

import grpc

from fastcheck_proto.conventions import ERROR_METADATA_KEY, MESSAGE_BYTES_MAX, default_address
from fastcheck_proto.v1 import admin_pb2, admin_pb2_grpc, common_pb2, node_pb2, node_pb2_grpc, registry_pb2

from .errors import DaemonUnavailableError, FastCheckError, RegistryUnavailableError, from_code

R = TypeVar("R")
Json = dict[str, Any]

_UNREACHABLE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNIMPLEMENTED}


class AdminClient:
    """Asks one node's agent about the cluster. Synchronous; may be shared by threads; also a context manager.

    Args:
        address: `unix:///path` or `host:port` of any agent. Default: FASTCHECK_ADDRESS, else this node's.
        timeout_s: longest that any question may take.

    Every method raises `DaemonUnavailableError` when nobody answers in time, and another `FastCheckError`
    when the daemon refuses: `StepNotFoundError`, `RegistryUnavailableError`, `InvalidArgumentError`.
    """

    def __init__(self, address: str | None = None, *, timeout_s: float = 5.0) -> None:
        self.address = address or os.environ.get("FASTCHECK_ADDRESS") or default_address()
        self.timeout_s = timeout_s
        self._channel = grpc.insecure_channel(
            self.address,
            options=[
                ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
                ("grpc.enable_http_proxy", 0),
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.min_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 1000),
            ],
        )
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        self._node = node_pb2_grpc.NodeServiceStub(self._channel)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def status(self) -> Json:
        """Health of the cluster, why it is not OK, and what to do."""
        reply = self._ask(lambda t: self._admin.Status(admin_pb2.StatusRequest(), timeout=t))
        return {
            "health": _word(admin_pb2.Health.Name(reply.health), "HEALTH_"),
            "codes": [
                {
                    "code": code.code,
                    "severity": _word(admin_pb2.Health.Name(code.severity), "HEALTH_"),
                    "detail": code.detail,
                    "do": code.remedy,
                }
                for code in reply.codes
            ],
            "epoch": reply.epoch,
            "leader": reply.leader or None,
            "nodes_up": reply.nodes_up,
            "nodes_total": reply.nodes_total,
            "cluster_id": reply.cluster_id,
            "voters": list(reply.voters),
        }

    def nodes(self) -> Json:
        """All members, their state and memory."""
        reply = self._ask(lambda t: self._admin.Nodes(admin_pb2.NodesRequest(), timeout=t))
        return {
            "nodes": [
                {
                    "node_id": report.record.node_id,
                    "state": _word(registry_pb2.NodeState.Name(report.record.state), "NODE_STATE_"),
                    "incarnation": report.record.incarnation,
                    "address": report.record.agent_address,
                    "voter": report.record.voter,
                    "ram_used_bytes": report.record.ram_used_bytes,
                    "ram_budget_bytes": report.record.ram_budget_bytes,
                    "reachable": report.reachable,
                    "counters": dict(sorted(report.counters.items())),
                }
                for report in reply.nodes
            ]
        }

    def jobs(self) -> Json:
        """All jobs and the committed steps kept of each."""
        reply = self._ask(lambda t: self._admin.Jobs(admin_pb2.JobsRequest(), timeout=t))
        return {
            "jobs": [
                {
                    "job": job.job,
                    "world_size": job.world_size,
                    "newest_step": max(job.kept_steps, default=None),
                    "kept_steps": sorted(job.kept_steps),
                }
                for job in reply.jobs
            ]
        }

    def checkpoints(self, job: str) -> Json:
        """A job's steps that can be loaded or are under way. Without a registry, what the nodes hold complete."""
        request = admin_pb2.CheckpointsRequest(job=job)
        reply = self._ask(lambda t: self._admin.Checkpoints(request, timeout=t))
        return {
            "checkpoints": [
                {
                    "step": step.step,
                    "state": _word(registry_pb2.StepState.Name(step.state), "STEP_STATE_").lower(),
                    "ranks": step.ranks,
                    "world_size": step.world_size,
                    "bytes": step.bytes,
                    "copies": step.copies,
                    "lossy": step.lossy,
                }
                for step in sorted(reply.steps, key=lambda s: s.step)
            ],
            "registry_answered": not reply.without_registry,
            "unreachable": list(reply.unreachable),
        }

    def replicas(self, job: str, step: int | None = None) -> Json:
        """Which nodes say that they hold which shard, of one step or of all that are kept."""
        request = admin_pb2.ReplicasRequest(job=job, step=step)
        reply = self._ask(lambda t: self._admin.Replicas(request, timeout=t))
        return {"replicas": _replicas(reply.replicas), "unreachable": list(reply.unreachable)}

    def inspect(self, job: str, step: int) -> Json:
        """Everything about one committed step."""
        request = admin_pb2.InspectRequest(job=job, step=step)
        reply = self._ask(lambda t: self._admin.Inspect(request, timeout=t))
        record = reply.record
        return {
            "job": record.job,
            "step": record.step,
            "state": "committed",
            "world_size": record.world_size,
            "copies": record.copies,
            "bytes": sum(rank.state_bytes for rank in record.ranks),
            "lossy": any(rank.lossy for rank in record.ranks),
            "ranks": [
                {
                    "rank": rank.rank,
                    "owner": rank.owner.node_id,
                    "incarnation": rank.owner.incarnation,
                    "session": rank.session,
                    "bytes": rank.state_bytes,
                    "shards": len(rank.shards),
                    "lossy": rank.lossy,
                    "codecs": _codecs(use for r in reply.replicas if r.rank == rank.rank for use in r.codecs),
                }
                for rank in sorted(record.ranks, key=lambda r: r.rank)
            ],
            "replicas": _replicas(reply.replicas),
            "unreachable": list(reply.unreachable),
        }

    def describe(self) -> Json:
        """The node that answers at this address."""
        reply = self._ask(lambda t: self._node.Describe(node_pb2.DescribeRequest(), timeout=t))
        return {
            "cluster_id": reply.cluster_id,
            "node_id": reply.node_id,
            "incarnation": reply.incarnation,
            "version": reply.version,
        }

    def _ask(self, call: Callable[[float], R]) -> R:
        try:
            return call(self.timeout_s)
        except grpc.RpcError as error:
            raise _error(error, self.address, self.timeout_s) from None


def _error(error: grpc.RpcError, address: str, timeout_s: float) -> FastCheckError:
    assert isinstance(error, grpc.Call)
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_METADATA_KEY and value in common_pb2.ErrorCode.keys():  # noqa: SIM118  an enum wrapper
            code = common_pb2.ErrorCode.Value(str(value))
            message = error.details() or str(value)
            # Silent nodes only make an answer partial: what an agent cannot do without is the registry.
            if code == common_pb2.ERROR_CODE_UNREACHABLE:
                return RegistryUnavailableError(message)
            return from_code(code, message)
    if error.code() not in _UNREACHABLE:
        return FastCheckError(f"the daemon at {address} failed: {error.code().name} {error.details()}")
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        why = f"no answer within {timeout_s:g} s"
    elif error.code() is grpc.StatusCode.UNIMPLEMENTED:
        why = "something else than a fastcheckd agent answers there"
    else:
        why = (error.details() or "no connection").splitlines()[0]
    return DaemonUnavailableError(
        f"cannot reach a daemon at {address}: {why}. Is fastcheckd running there? "
        "Name another node with --address or FASTCHECK_ADDRESS."
    )


def _word(name: str, prefix: str) -> str:
    return name.removeprefix(prefix)


def _replicas(reports: Iterable[admin_pb2.ReplicaReport]) -> list[Json]:
    return [
        {
            "step": report.step,
            "rank": report.rank,
            "shard": report.shard,
            "owner": report.owner,
            "holders": list(report.holders),
            "placed": list(report.placed),
            "owner_holds": report.owner_holds,
            "bytes": report.bytes,
            "digest": report.digest.hex(),
            "verified_at": _iso_utc(report.verified_at_ms),
            "stored_bytes": report.stored_bytes,
            "lossy": report.lossy,
            "codecs": _codecs(report.codecs),
        }
        for report in reports
    ]


def _codecs(uses: Iterable[common_pb2.CodecUse]) -> Json:
    """Codec → raw and encoded bytes, over all copies, as they were sent."""
    found: Json = {}
    for use in sorted(uses, key=lambda u: u.codec):
        sums = found.setdefault(use.codec, {"raw_bytes": 0, "encoded_bytes": 0})
        sums["raw_bytes"] += use.raw_bytes
        sums["encoded_bytes"] += use.encoded_bytes
    return found


def _iso_utc(unix_ms: int) -> str | None:
    if not unix_ms:
        return None
    moment = datetime.datetime.fromtimestamp(unix_ms / 1000, tz=datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
