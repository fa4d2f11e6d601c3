"""Admission of gRPC calls, at every server of the daemon: who calls, what `roles.py` lets them, whose a job is.

Requests come to it as bytes, and are parsed once their caller may make them and they are not too large
(`request_limits`). Bytes that are no message are refused here, too. gRPC by itself would answer UNKNOWN, and log a
traceback for each.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from fastcheck_proto.conventions import TOKEN_METADATA_KEY
from fastcheck_proto.v1 import registry_pb2 as rpb

from ..errors import DeniedError, FastCheckdError, InvalidRequestError, OverBudgetError
from ..log import Complaints
from ..registry.client import RegistryClient
from ..registry.model import check_use
from ..rpc import abort
from . import request_limits, roles

if TYPE_CHECKING:
    from ..view import ViewFollower  # the registry process has this module, and nothing of the store

Context = grpc.aio.ServicerContext[Any, Any]
_Parse = Callable[[bytes], Any]

#: To ask the registry whose a job is.
LOOKUP_TIMEOUT_S = 10.0

_complaints = Complaints(logging.getLogger(__name__), "gRPC")

#: Who makes the call that is answered; local where nothing stands before the service.
CALLER: ContextVar[roles.Caller] = ContextVar("caller", default=roles.LOCAL)

#: Whether requests and responses are streams → the field of a handler that answers, and how a handler is made.
_KINDS: dict[tuple[bool, bool], tuple[str, Any]] = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


class _Tokens(Protocol):
    def subject(self, token: str) -> str:
        """Whom a token names; DeniedError if it does not pass."""

    def advice(self) -> str:
        """What a trainer needs."""


def bearer(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """The token that a call shows; None: it shows none.

    Raises:
        DeniedError: it shows something else there, or several.
    """
    shown = [value for key, value in metadata or () if key == TOKEN_METADATA_KEY]
    if not shown:
        return None
    scheme, _, token = shown[0].partition(" ") if isinstance(shown[0], str) else ("", "", "")
    if len(shown) != 1 or scheme.lower() != "bearer" or not token:
        raise DeniedError(f"a call shows one token, as '{TOKEN_METADATA_KEY}: Bearer TOKEN'")
    return token


class Admission(grpc.aio.ServerInterceptor):
    """Lets a call through to its service if its caller may make it.

    Args:
        cluster_id: whose certificates count.
        voters: the nodes that pass on what others say.
        tokens: whose trainers' tokens are; None: there are none, and one that is shown counts for nothing.
    """

    def __init__(
        self,
        cluster_id: str,
        voters: Callable[[], Collection[str]] = tuple,
        tokens: _Tokens | None = None,
    ) -> None:
        self._cluster_id = cluster_id
        self._voters = voters
        self._tokens = tokens
        self._in_hand = request_limits.InHand()

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Put the checks before the method's handler."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # UNIMPLEMENTED
        method: str = handler_call_details.method
        kind, remake = _KINDS[handler.request_streaming, handler.response_streaming]
        checked = self._streaming if handler.response_streaming else self._answering
        parse = handler.request_deserializer
        requests = self._each if handler.request_streaming else self._one
        return remake(
            checked(method, getattr(handler, kind), partial(requests, method, parse)),
            request_deserializer=None,
            response_serializer=handler.response_serializer,
        )

    def _answering(self, method: str, behaviour: Any, requests: Any) -> Any:
        async def answer(raw: Any, context: Context) -> Any:
            who = await self._admit(method, context)
            async with requests(who, raw, context) as request:
                return await behaviour(request, context)

        return answer

    def _streaming(self, method: str, behaviour: Any, requests: Any) -> Any:
        async def stream(raw: Any, context: Context) -> AsyncIterator[Any]:
            who = await self._admit(method, context)
            async with requests(who, raw, context) as request:
                answers = behaviour(request, context)
                if inspect.isawaitable(answers):  # writes by itself
                    await answers
                    return
                async for response in answers:
                    yield response

        return stream

    async def _admit(self, method: str, context: Context) -> roles.Caller:
        """Who calls, if it may; otherwise the call ends."""
        try:
            who = self._by_token(self._caller(context), method, context)
            roles.check_method(who, method)
        except DeniedError as error:
            await _refuse(context, method, error)
        CALLER.set(who)
        return who

    @contextlib.asynccontextmanager
    async def _one(
        self, method: str, parse: _Parse, who: roles.Caller, raw: bytes, context: Context
    ) -> AsyncIterator[Any]:
        """The request, charged to its caller for as long as it is answered."""
        with await self._taken(method, parse, who, raw, context) as request:
            yield request

    @contextlib.asynccontextmanager
    async def _each(
        self, method: str, parse: _Parse, who: roles.Caller, raws: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[Any]:
        """The requests one by one, each charged until the next one is asked for."""

        async def requests() -> AsyncGenerator[Any, None]:
            async for raw in raws:
                with await self._taken(method, parse, who, raw, context) as request:
                    yield request

        async with contextlib.aclosing(requests()) as them:
            yield them

    async def _taken(
        self, method: str, parse: _Parse, who: roles.Caller, raw: bytes, context: Context
    ) -> contextlib.AbstractContextManager[Any]:
        taken = 0
        try:
            request_limits.check_bytes(method, len(raw))
            taken = self._in_hand.take(who, len(raw))
            request = _parsed(method, parse, who, raw)
            if roles.names_a_speaker(method):
                roles.check_speaker(who, method, request, self._voters())
        except (DeniedError, InvalidRequestError, OverBudgetError) as error:
            self._in_hand.give(who, taken)
            await _refuse(context, method, error)
        return self._answered(who, taken, request)

    @contextlib.contextmanager
    def _answered(self, who: roles.Caller, taken: int, request: Any) -> Iterator[Any]:
        try:
            yield request
        finally:
            self._in_hand.give(who, taken)

    def _by_token(self, who: roles.Caller, method: str, context: Context) -> roles.Caller:
        """Who calls, if a token may say so; a bad one is never taken for none."""
        if self._tokens is None or not roles.may_show_token(who, method):
            return who
        token = bearer(context.invocation_metadata())
        if token is not None:
            return roles.Caller(roles.BEARER, self._tokens.subject(token))
        if who == roles.LOCAL:
            raise DeniedError(f"trainers show a token here: {self._tokens.advice()}")
        return who

    def _caller(self, context: Context) -> roles.Caller:
        known = context.auth_context()
        if b"ssl" not in known.get("transport_security_type", ()):
            # A port under TLS takes nothing else: this is a Unix socket, or a daemon without certificates.
            return roles.LOCAL
        return roles.caller(
            [uri.decode(errors="replace") for uri in known.get("peer_uri", ())], self._cluster_id
        )


def _parsed(method: str, parse: _Parse, who: roles.Caller, raw: bytes) -> Any:
    try:
        request = parse(raw)
    except (DecodeError, ValueError):  # the latter: text that is no UTF-8, in pure Python
        raise InvalidRequestError(f"what {who} sent to {method} is no request of it") from None
    if why := request_limits.too_many(method, request):
        del request  # or the error's traceback keeps it until the caller has read the answer
        raise InvalidRequestError(f"malformed request of {method}: {why}")
    return request


async def _refuse(context: Context, method: str, error: FastCheckdError) -> None:
    """End the call, and say so: a caller that is told may be one that nobody looks at."""
    _complaints.add("refused %s of %s: %s", method, context.peer(), error)
    await abort(context, error)


class Owners:
    """Whose jobs are, by the newest view, and for jobs that it does not name by the registry.

    Args:
        enforced: whether there are identities at all; without certificates everybody is one.
    """

    def __init__(self, view: ViewFollower, registry: RegistryClient, *, enforced: bool) -> None:
        self._view = view
        self._registry = registry
        self._enforced = enforced

    async def check(self, job: str) -> None:
        """Go on if the caller may use the job, or nobody has it yet.

        An owner never changes while a job is known, so an old view is as good as a new one.

        Raises:
            DeniedError: the job is another one's.
            NoQuorumError: whose it is nobody can say now.
        """
        if not self._enforced:
            return
        owner = self._view.owner(job)
        if owner is None:
            found = await self._registry.lookup(rpb.LookupRequest(job=job, rank=0), LOOKUP_TIMEOUT_S)
            owner = found.owner
        if owner:
            check_use(str(CALLER.get()), owner, job)
