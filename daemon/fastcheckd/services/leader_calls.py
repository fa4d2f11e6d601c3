"""What all calls share that only the leader answers: a follower forwards them to it.

A forwarded call is the caller's own, repeated, which every deciding call allows. It is marked, and nobody forwards it
again, so two voters that each believe the other one leads do not pass it on for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, TypeVar

import grpc
import grpc.aio

from fastcheck_proto.conventions import ERROR_METADATA_KEY, FORWARDED_METADATA_KEY
from fastcheck_proto.v1 import registry_log_pb2 as log_pb2

from ..config import Config, Voter
from ..errors import InvalidRequestError, NoQuorumError, from_code
from ..registry.commands import check
from ..registry.leader import Leader
from ..registry.outward import Stubs
from ..registry.raft.consensus import Consensus
from ..rpc import answers

Context = grpc.aio.ServicerContext[Any, Any]
S = TypeVar("S", bound="LeaderCalls")
Q = TypeVar("Q")
R = TypeVar("R")

#: Forwarded calls under way at one voter; others have to find another one.
FORWARDS_MAX = 2048
#: Longest that one forwarded call may take: a report may wait for 10 s.
FORWARD_S_MAX = 15.0
#: How long a call waits here for a leader to be found: longer than an election takes when a leader has ended.
LEADERLESS_S_MAX = 1.0
#: Calls that wait for a leader at one voter; others are refused, and try again after a pause.
WAITING_MAX = 2048
#: Of the caller's time this much is left for the answer to come back.
FORWARD_MARGIN_S = 0.1
_FORWARDED = ((FORWARDED_METADATA_KEY, "1"),)


@contextmanager
def checking() -> Iterator[None]:
    """What the checks of names and records raise is the caller's mistake."""
    try:
        yield
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None


class LeaderCalls:
    """Calls to one voter that only the leader answers; a part of `services.registry.RegistryService`.

    Args:
        stubs: how this voter reaches the leader to forward to it.
    """

    def __init__(self, config: Config, raft: Consensus, leader: Leader, stubs: Stubs) -> None:
        self._config = config
        self._raft = raft
        self._leader = leader
        self._stubs = stubs
        self._forwards = 0
        self._waiting = 0

    async def _until_led(self, context: Context) -> None:
        """While nobody leads, wait for a leader.

        Without the wait, callers would find a new leader only at their next attempt, after a growing pause.
        """
        if self._leader.ready or self._other_leader() is not None or self._waiting >= WAITING_MAX:
            return
        left_s = context.time_remaining()
        wait_s = LEADERLESS_S_MAX if left_s is None else min(LEADERLESS_S_MAX, left_s - FORWARD_MARGIN_S)
        self._waiting += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while not self._leader.ready and self._other_leader() is None:
                        await self._leader.news()
        finally:
            self._waiting -= 1

    async def _propose(self, command: log_pb2.RegistryCommand) -> log_pb2.RegistryResult:
        """Commit a command, well-formed or not; a refusal becomes the error it stands for."""
        with checking():
            check(command)
        command.at_ms = self._leader.wall_ms()
        result = await self._raft.propose(command)
        if not result.ok:
            raise from_code(result.code, result.message)
        return result

    def _other_leader(self) -> Voter | None:
        leader = self._raft.leader
        return None if leader is None or leader.node_id == self._config.node_id else leader

    async def _forward(self, method: str, request: Any, context: Context) -> Any:
        """Ask the leader, once, and answer as it does.

        Raises:
            NoQuorumError: no leader is known or answers, or too much is forwarded already.
        """
        me, leader = self._config.node_id, self._other_leader()
        if leader is None:
            raise NoQuorumError(f"voter {me} is not the leader, and knows none now; try again")
        if _is_forwarded(context):
            raise NoQuorumError(f"voter {me} is not the leader; it goes by {leader.registry_address}")
        if self._forwards >= FORWARDS_MAX:
            raise NoQuorumError(f"voter {me} forwards {FORWARDS_MAX} calls already; ask another one")
        left_s = context.time_remaining()
        timeout_s = (
            FORWARD_S_MAX if left_s is None else min(FORWARD_S_MAX, max(left_s - FORWARD_MARGIN_S, 0.0))
        )
        self._forwards += 1
        try:
            async with asyncio.timeout(timeout_s):
                call = getattr(self._stubs(leader.registry_address), method)
                return await call(request, timeout=timeout_s, metadata=_FORWARDED)
        except TimeoutError:
            problem = f"no answer within {timeout_s:.1f} s"
        except grpc.aio.AioRpcError as error:
            trailing = dict(tuple(error.trailing_metadata() or ()))
            if (name := trailing.get(ERROR_METADATA_KEY)) is not None:
                ours = ((ERROR_METADATA_KEY, str(name)),)
                await context.abort(error.code(), error.details() or "", ours)
            problem = error.details() or error.code().name
        finally:
            self._forwards -= 1
        raise NoQuorumError(f"voter {me} did not reach the leader at {leader.registry_address}: {problem}")


def decides(
    method: Callable[[S, Q, Context], Awaitable[R]],
) -> Callable[[S, Q, Context], Awaitable[R]]:
    """Decorate a call that only the leader answers: a follower forwards it."""

    @answers
    @wraps(method)
    async def wrapper(self: S, request: Q, context: Context) -> R:
        await self._until_led(context)
        if not self._leader.ready:
            answer: R = await self._forward(method.__name__, request, context)
            return answer
        return await method(self, request, context)

    return wrapper


def _is_forwarded(context: Context) -> bool:
    return (FORWARDED_METADATA_KEY, "1") in tuple(context.invocation_metadata() or ())
