"""What all calls share that only the leader answers: refusing them elsewhere, or asking the leader for the caller.

A caller whose way to the leader is cut, while ours is not, may ask us to relay (`RELAY_METADATA_KEY`). The relayed
call is the caller's own, repeated, which every deciding call allows. It goes without that key: nobody
relays it again, so two voters that each believe the other one leads do not pass it on for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, TypeVar

import grpc
import grpc.aio

from fastcheck_proto.conventions import ERROR_METADATA_KEY, LEADER_METADATA_KEY, RELAY_METADATA_KEY
from fastcheck_proto.v1 import common_pb2

from ..config import Config, Voter
from ..errors import InvalidRequestError, NoQuorumError, from_code
from ..registry import wire
from ..registry.leader import Leader
from ..registry.raft.consensus import Consensus
from ..registry.records import Json
from ..registry.stubs import Stubs
from ..rpc import answers

Context = grpc.aio.ServicerContext[Any, Any]
S = TypeVar("S", bound="LeaderCalls")
Q = TypeVar("Q")
R = TypeVar("R")

#: Relayed calls under way at one voter; others have to find another one.
RELAYS_MAX = 256
#: Longest that one relayed call may take: a report may wait for 10 s.
RELAY_S_MAX = 15.0
#: How long a call waits here for a leader to be found: longer than an election takes when a leader has ended.
LEADERLESS_S_MAX = 1.0
#: Calls that wait for a leader at one voter; others are refused, and try again after a pause.
WAITING_MAX = 2048
#: Of the caller's time this much is left for the answer to come back.
RELAY_MARGIN_S = 0.1


@contextmanager
def checking() -> Iterator[None]:
    """What the checks of names and records raise is the caller's mistake."""
    try:
        yield
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None


class LeaderCalls:
    """The office of one voter; a part of `services.registry.RegistryService`.

    Args:
        stubs: how this voter reaches the leader to relay to it.
    """

    def __init__(self, config: Config, raft: Consensus, leader: Leader, stubs: Stubs) -> None:
        self._config = config
        self._raft = raft
        self._leader = leader
        self._stubs = stubs
        self._relays = 0
        self._waiting = 0

    async def _need_leader(self, context: Context) -> None:
        """End the call unless this voter leads; says who does. While nobody does, wait for a leader.

        Without the wait, callers would find a new leader only at their next attempt, after a growing pause.
        """
        await self._until_led(context)
        if self._leader.ready:
            return
        leader = self._other_leader()
        trailing = [(ERROR_METADATA_KEY, common_pb2.ErrorCode.Name(common_pb2.ERROR_CODE_NO_QUORUM))]
        message = f"voter {self._config.node_id} is not the leader, and knows none now; try again"
        if leader is not None:
            trailing.append((LEADER_METADATA_KEY, leader.registry_address))
            message = f"voter {self._config.node_id} is not the leader; ask {leader.registry_address}"
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message, tuple(trailing))

    async def _until_led(self, context: Context) -> None:
        if self._leader.ready or self._other_leader() is not None or self._waiting >= WAITING_MAX:
            return
        left_s = context.time_remaining()
        wait_s = LEADERLESS_S_MAX if left_s is None else min(LEADERLESS_S_MAX, left_s - RELAY_MARGIN_S)
        self._waiting += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while not self._leader.ready and self._other_leader() is None:
                        await self._leader.news()
        finally:
            self._waiting -= 1

    async def _propose(self, command: Json) -> Json:
        """Commit a command; a refusal becomes the error it stands for."""
        result = await self._raft.propose(command)
        if not result["ok"]:
            raise from_code(wire.error_code(result["code"]), result["message"])
        return result

    def _other_leader(self) -> Voter | None:
        leader = self._raft.leader
        return None if leader is None or leader.node_id == self._config.node_id else leader

    async def _relay(self, method: str, leader: Voter, request: Any, context: Context) -> Any:
        """Ask the leader, once, and answer as it does.

        Raises:
            NoQuorumError: the leader did not answer, or too much is relayed already.
        """
        if self._relays >= RELAYS_MAX:
            raise NoQuorumError(
                f"voter {self._config.node_id} relays {RELAYS_MAX} calls already; ask another one"
            )
        left_s = context.time_remaining()
        timeout_s = RELAY_S_MAX if left_s is None else min(RELAY_S_MAX, max(left_s - RELAY_MARGIN_S, 0.0))
        self._relays += 1
        try:
            async with asyncio.timeout(timeout_s):
                return await getattr(self._stubs(leader.registry_address), method)(request, timeout=timeout_s)
        except TimeoutError:
            problem = f"no answer within {timeout_s:.1f} s"
        except grpc.aio.AioRpcError as error:
            trailing = tuple((key, str(value)) for key, value in error.trailing_metadata() or ())
            if any(key == ERROR_METADATA_KEY for key, _ in trailing):
                ours = tuple(
                    pair for pair in trailing if pair[0] in (ERROR_METADATA_KEY, LEADER_METADATA_KEY)
                )
                await context.abort(error.code(), error.details() or "", ours)
            problem = error.details() or error.code().name
        finally:
            self._relays -= 1
        raise NoQuorumError(
            f"voter {self._config.node_id} did not reach the leader at {leader.registry_address} either: {problem}"
        )


def decides(
    method: Callable[[S, Q, Context], Awaitable[R]],
) -> Callable[[S, Q, Context], Awaitable[R]]:
    """Decorate a call that only the leader answers: elsewhere it is relayed if the caller asks for that.

    The method itself calls `_need_leader`, after it has checked the request.
    """

    @answers
    @wraps(method)
    async def wrapper(self: S, request: Q, context: Context) -> R:
        if not self._leader.ready and _asks_for_relay(context):
            leader = self._other_leader()
            if leader is not None:
                answer: R = await self._relay(method.__name__, leader, request, context)
                return answer
        return await method(self, request, context)

    return wrapper


def _asks_for_relay(context: Context) -> bool:
    return any(
        key == RELAY_METADATA_KEY and value == "1" for key, value in context.invocation_metadata() or ()
    )
