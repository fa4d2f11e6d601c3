"""The operator's client in Python: the results of `fastcheck status`, `nodes`, `replicas` ... as plain dicts.

Any node's agent answers for the whole cluster. All results are JSON-ready, in the shapes of `admin_shapes.py`. No torch
and no command line in this module.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import grpc

from fastcheck_proto.conventions import ERROR_METADATA_KEY, MESSAGE_BYTES_MAX, default_address
from fastcheck_proto.v1 import admin_pb2, admin_pb2_grpc, common_pb2, node_pb2, node_pb2_grpc, registry_pb2

from . import admin_shapes as shapes
from . import security
from .errors import (
    DaemonUnavailableError,
    FastCheckError,
    InvalidArgumentError,
    RegistryUnavailableError,
    from_code,
)

R = TypeVar("R")
Json = dict[str, Any]

_UNREACHABLE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNIMPLEMENTED}


class AdminClient:
    """Asks one node's agent about the cluster. Synchronous; may be shared by threads; also a context manager.

    Args:
        address: `unix:///path` or `host:port` of any agent. Default: FASTCHECK_ADDRESS, else this node's.
        timeout_s: longest that any question may take.

    Every method raises `DaemonUnavailableError` when nobody answers in time, and another `FastCheckError`
    when the daemon refuses: `StepNotFoundError`, `RegistryUnavailableError`, `InvalidArgumentError`, `UnsafeError`.
    """

    def __init__(self, address: str | None = None, *, timeout_s: float = 5.0) -> None:
        self.address = address or os.environ.get("FASTCHECK_ADDRESS") or default_address()
        self.timeout_s = timeout_s
        self._channel = security.open_channel(
            self.address,
            [
                ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
                ("grpc.enable_http_proxy", 0),
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.initial_reconnect_backoff_ms", 100),
                # gRPC takes this for the deadline of a handshake, too: a daemon on busy cores may need all of our time.
                ("grpc.min_reconnect_backoff_ms", max(1, int(timeout_s * 1000))),
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
        return shapes.status(self._ask(lambda t: self._admin.Status(admin_pb2.StatusRequest(), timeout=t)))

    def nodes(self) -> Json:
        """All members: state, its reason and time, memory, labels and counters."""
        reply = self._ask(lambda t: self._admin.Nodes(admin_pb2.NodesRequest(), timeout=t))
        return {"nodes": [shapes.node(report) for report in reply.nodes]}

    def history(self, node_id: str = "", limit: int = 0) -> Json:
        """Recorded changes of nodes' states, of one node or of all; the newest last.

        Args:
            limit: return at most this many, the newest. 0: all.
        """
        request = admin_pb2.NodeHistoryRequest(node_id=node_id, limit=limit)
        reply = self._ask(lambda t: self._admin.NodeHistory(request, timeout=t))
        return {"transitions": [shapes.transition(change) for change in reply.transitions]}

    def drain(self, node_id: str, *, undo: bool = False) -> Json:
        """Drain a node: it gets nothing new, and its copies are made elsewhere. `undo` ends the draining."""
        request = admin_pb2.DrainRequest(node_id=node_id, undo=undo)
        self._ask(lambda t: self._admin.Drain(request, timeout=t))
        return {"node_id": node_id, "draining": not undo}

    def safe_to_stop(self, node_id: str) -> Json:
        """What stopping a node for good would cost: nothing (`safe`), redundancy (`survivable`), or more."""
        request = admin_pb2.CheckStopRequest(node_id=node_id)
        reply = self._ask(lambda t: self._admin.CheckStop(request, timeout=t))
        return {"node_id": node_id} | shapes.verdict(reply.verdict)

    def forget(self, node_id: str) -> Json:
        """Take a DOWN node off the list."""
        request = admin_pb2.ForgetNodeRequest(node_id=node_id)
        self._ask(lambda t: self._admin.ForgetNode(request, timeout=t))
        return {"node_id": node_id, "forgotten": True}

    def verify(self, job: str, step: int | None = None) -> Json:
        """Have every node verify its replicas of a job, or of one step, now. Takes as long as reading them."""
        request = admin_pb2.VerifyRequest(job=job, step=step)
        return shapes.verified(self._ask(lambda t: self._admin.Verify(request, timeout=t)))

    def voters(self) -> Json:
        """The registry's voters and their health. Each is asked directly, so it works without a leader."""
        reply = self._ask(lambda t: self._admin.ListVoters(admin_pb2.ListVotersRequest(), timeout=t))
        return {"voters": [shapes.voter_report(report) for report in reply.voters]}

    def replace_voter(
        self, old: str, new: str, *, registry_address: str = "", raft_address: str = ""
    ) -> Json:
        """Put the node `new` in the place of the voter `old`, which is gone for good.

        Args:
            registry_address, raft_address: host:port of the new voter's; empty: its host with the old ports.

        Takes as long as the new voter needs to catch up: give the client a `timeout_s` to match.
        """
        request = admin_pb2.ChangeVoterRequest(
            change=registry_pb2.ReplaceVoterRequest(
                old_node_id=old,
                new_node_id=new,
                registry_address=registry_address,
                raft_address=raft_address,
            )
        )
        reply = self._ask(lambda t: self._admin.ChangeVoter(request, timeout=t))
        return {"voters": [shapes.voter(record) for record in reply.voters]}

    def add_voters(
        self,
        nodes: Sequence[str],
        *,
        registry_addresses: Sequence[str] = (),
        raft_addresses: Sequence[str] = (),
    ) -> Json:
        """Have more nodes vote: so many that there are 3, 5 or 7 voters afterwards.

        Args:
            registry_addresses, raft_addresses: host:port of each, in the order of `nodes`; none: each node's host with
                the first voter's ports.

        Takes as long as they need to catch up: give the client a `timeout_s` to match.
        """
        for given in (registry_addresses, raft_addresses):
            if given and len(given) != len(nodes):
                raise InvalidArgumentError(
                    f"{len(nodes)} nodes need as many addresses, or none, not {len(given)}"
                )
        addresses = zip(
            nodes, registry_addresses or [""] * len(nodes), raft_addresses or [""] * len(nodes), strict=True
        )
        request = admin_pb2.EnlargeVotersRequest(
            change=registry_pb2.AddVotersRequest(
                voters=[
                    node_pb2.VoterRecord(node_id=name, registry_address=registry, raft_address=raft)
                    for name, registry, raft in addresses
                ]
            )
        )
        reply = self._ask(lambda t: self._admin.EnlargeVoters(request, timeout=t))
        return {"voters": [shapes.voter(record) for record in reply.voters]}

    def delete(
        self,
        job: str,
        step: int | None = None,
        *,
        everything: bool = False,
        even_if_running: bool = False,
        dry_run: bool = False,
    ) -> Json:
        """Delete a committed step, or all of a job. Nodes drop it as soon as they learn of it.

        Args:
            step: or else `everything`: what is under way is refused as well, and step numbers may begin anew.
            even_if_running: also what a trainer that runs would be restored from: the newest step, or everything.
                What it has under way is refused, then it saves on. Without it that raises `UnsafeError`.
            dry_run: only say what would go, and as `refusal` why it would be refused.

        A step that is not kept is nothing to delete, and no error.
        """
        if (step is None) != everything:
            raise InvalidArgumentError("delete needs a step, or everything=True, and not both")
        wanted = registry_pb2.DeleteStepsRequest(
            job=job, step=step, even_if_running=even_if_running, dry_run=dry_run
        )
        reply = self._ask(lambda t: self._admin.Delete(admin_pb2.DeleteRequest(steps=wanted), timeout=t))
        asked = {"job": job, "step": step, "everything": everything, "deleted": not dry_run}
        return asked | shapes.deletion(reply)

    def jobs(self) -> Json:
        """All jobs and the committed steps kept of each."""
        reply = self._ask(lambda t: self._admin.Jobs(admin_pb2.JobsRequest(), timeout=t))
        return {
            "jobs": [
                {
                    "job": job.job,
                    "world_size": job.world_size,
                    "newest_step": max(job.kept_steps, default=None),
                    **shapes.last_commit(job, time.time()),
                    "kept_steps": sorted(job.kept_steps),
                    "owner": job.owner or "local",
                }
                for job in reply.jobs
            ]
        }

    def checkpoints(self, job: str) -> Json:
        """A job's steps that can be loaded or are under way; without a registry, those that the nodes hold complete."""
        request = admin_pb2.CheckpointsRequest(job=job)
        reply = self._ask(lambda t: self._admin.Checkpoints(request, timeout=t))
        return {
            "checkpoints": [shapes.step(s) for s in sorted(reply.steps, key=lambda s: s.step)],
            "registry_answered": not reply.without_registry,
            "unreachable": list(reply.unreachable),
        }

    def replicas(self, job: str, step: int | None = None) -> Json:
        """The holders of each shard as the nodes report them, of one step or of all kept steps."""
        request = admin_pb2.ReplicasRequest(job=job, step=step)
        reply = self._ask(lambda t: self._admin.Replicas(request, timeout=t))
        return {
            "replicas": [shapes.replica(report) for report in reply.replicas],
            "unreachable": list(reply.unreachable),
        }

    def inspect(self, job: str, step: int) -> Json:
        """Everything about one committed step."""
        request = admin_pb2.InspectRequest(job=job, step=step)
        return shapes.inspected(self._ask(lambda t: self._admin.Inspect(request, timeout=t)))

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
        security.check_socket(self.address)
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
        f"Name another node with --address or FASTCHECK_ADDRESS.{security.hint(address)}"
    )
