"""TrainerService: what a trainer on this node, or one without a daemon of its own, asks of the data process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError

from fastcheck_proto.conventions import (
    HEADER_BYTES_MAX,
    RANK_MAX,
    REQUEST_BYTES_MAX,
    STEP_MAX,
    STREAM_PIECE_BYTES,
    check_name,
)
from fastcheck_proto.seal_record import FOOTER_BYTES, NewerRecordError, read_record
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheck_proto.v1 import trainer_pb2 as tpb
from fastcheck_proto.v1 import trainer_pb2_grpc as tpb_grpc

from ..errors import FastCheckdError, InvalidRequestError, NoQuorumError
from ..registry.client import RegistryClient
from ..restore.coordinator import RestoreCoordinator
from ..restore.progress_stream import ProgressStream
from ..restore.without_quorum import LOOKUP_TIMEOUT_S as PROVISIONAL_LOOKUP_TIMEOUT_S
from ..rpc import abort, answers
from ..save.coordinator import SaveCoordinator
from ..save.session import TrainerSession
from ..tasks import settled
from .admission import CALLER, Owners
from .request_limits import PIECE_BYTES_MAX, too_many_of_a_seal

logger = logging.getLogger(__name__)

#: Of a state, as far as sums go: no machine has as much.
STATE_BYTES_MAX = 1 << 50
IN_FLIGHT_MAX = 1024
LIST_TIMEOUT_S = 10.0
#: A trainer that ends waits for it.
CLOSE_TIMEOUT_S = 1.5

Context = grpc.aio.ServicerContext[Any, Any]


class TrainerService(tpb_grpc.TrainerServiceServicer):
    """Serves trainers, near ones by segments and far ones by streams."""

    def __init__(
        self,
        saving: SaveCoordinator,
        restore: RestoreCoordinator,
        registry: RegistryClient,
        owners: Owners,
    ) -> None:
        self._owners = owners
        self._saving = saving
        self._restore = restore
        self._registry = registry
        self._ending: set[asyncio.Task[None]] = set()

    # --- sessions --------------------------------------------------------------------------------

    async def Session(
        self, request_iterator: AsyncIterator[tpb.TrainerMessage], context: Context
    ) -> AsyncIterator[tpb.DaemonMessage]:
        """One process' tenure of one rank."""
        session: TrainerSession | None = None
        reading: asyncio.Task[None] | None = None
        try:
            session = await self._open(request_iterator)
            reading = asyncio.create_task(self._read(session, request_iterator), name="session")
            # Whatever ends the reading ends the stream.
            reading.add_done_callback(lambda _: session.hang_up())
            async for message in session.messages():
                yield message
            if reading.done():  # if not, the same client has another stream by now
                await reading
        except FastCheckdError as error:
            await abort(context, error)
        except grpc.aio.BaseError:
            raise  # ended by us, or the caller is gone
        except Exception as error:
            logger.exception("a session met a defect")
            await abort(context, FastCheckdError(f"internal error: {error!r}"))
        finally:
            if reading is not None and session is not None:
                reading.cancel()
                # Apart from this call, which may have been cancelled.
                ending = asyncio.create_task(self._end(session, reading), name="session-end")
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)
                # The messages that it reads are closed when this returns.
                await settled({reading})

    async def _open(self, messages: AsyncIterator[tpb.TrainerMessage]) -> TrainerSession:
        first = await anext(messages, None)
        if first is None or not first.HasField("open"):
            raise InvalidRequestError("a session begins with what it is to be: open")
        request = first.open
        _check_rank(request.job, request.rank, request.world_size)
        if not 1 <= len(request.client_id) <= 64:
            raise InvalidRequestError("client_id must have 1 to 64 characters")
        if request.max_in_flight > IN_FLIGHT_MAX:
            raise InvalidRequestError(f"at most {IN_FLIGHT_MAX} steps may be under way")
        await self._owners.check(request.job)
        self._restore.expect(request.job, request.rank)
        if (lost := self._saving.sessions.stream_of(request)) is not None:
            await self._end(lost)
        return await self._saving.sessions.open(request, str(CALLER.get()))

    async def _read(self, session: TrainerSession, messages: AsyncIterator[tpb.TrainerMessage]) -> None:
        """Act on what a trainer says, in its order, until it has no more to say or says that it is done."""
        async for message in messages:
            session.check_read()
            kind = message.WhichOneof("message")
            if kind == "reserve":
                await self._owners.check(session.job)
                self._reserve(session, message.reserve)
            elif kind == "sealed":
                await self._seal(session, message.sealed)
            elif kind == "abandon":
                self._saving.abandon(session, message.abandon.segment_id)
            elif kind == "close":
                closing = rpb.CloseRankRequest(job=session.job, rank=session.rank, session=session.number)
                # Unheard, the job counts as running: then deleting its newest step takes an explicit word.
                with contextlib.suppress(FastCheckdError):
                    await self._registry.close_rank(closing, timeout_s=CLOSE_TIMEOUT_S)
                await self._saving.sessions.close(session)
                return
            else:
                raise InvalidRequestError("a session is one open, then reservations, seals and the like")

    def _reserve(self, session: TrainerSession, request: tpb.ReserveMemory) -> None:
        step = request.step if request.HasField("step") else None
        if step is not None and step > STEP_MAX:
            error = InvalidRequestError(f"step {step} is not from 0 to {STEP_MAX}")
            session.refuse(error, step)
        elif not 0 < request.state_bytes <= STATE_BYTES_MAX:
            session.refuse(InvalidRequestError(f"no state has {request.state_bytes} bytes"), step)
        elif request.record_bytes > REQUEST_BYTES_MAX + FOOTER_BYTES:
            session.refuse(InvalidRequestError(f"no seal has {request.record_bytes} bytes"), step)
        else:
            self._saving.reserve(session, request)

    async def _seal(self, session: TrainerSession, sealed: tpb.Sealed) -> None:
        try:
            # The job may have become somebody's meanwhile.
            await self._owners.check(session.job)
            if sealed.step > STEP_MAX:
                raise InvalidRequestError(f"step {sealed.step} is not from 0 to {STEP_MAX}")
            if sealed.header_bytes > HEADER_BYTES_MAX:
                raise InvalidRequestError(f"a state header may have at most {HEADER_BYTES_MAX} bytes")
        except FastCheckdError as error:
            self._saving.abandon(session, sealed.segment_id)
            session.refuse(error, sealed.step)
            return
        await self._saving.sealed(session, sealed)

    async def _end(self, session: TrainerSession, reading: asyncio.Task[None] | None = None) -> None:
        """The stream is over. What the trainer sealed without being able to say so is found in its segments."""
        if reading is not None:
            await settled({reading})
            if not reading.cancelled():
                reading.exception()  # the call's own, if it was there to be told
        try:
            for segment_id, segment in [] if session.over else list(session.held.items()):
                record = await asyncio.to_thread(read_record, segment.view, segment_id)
                sealed = None if record is None else _parsed(record, segment_id)
                if sealed is not None:
                    await self._seal(session, sealed)
        except NewerRecordError as error:
            logger.warning("a step of rank %d of job %s is lost: %s", session.rank, session.job, error)
        except FastCheckdError as error:
            logger.info(
                "what rank %d of job %s has sealed is not looked for: %s", session.rank, session.job, error
            )
        finally:
            self._saving.sessions.leave(session)

    @answers
    async def Upload(
        self, request_iterator: AsyncIterator[tpb.UploadRequest], context: Context
    ) -> tpb.UploadResponse:
        """Bytes into a segment that a session of the caller holds."""
        first = await anext(request_iterator, None)
        if first is None or not first.HasField("target"):
            raise InvalidRequestError("an upload begins with its target")
        target = first.target
        _check_job(target.job)
        await self._owners.check(target.job)
        position = 0
        async for request in request_iterator:
            # With each piece: the segment may have been taken back, and be another step's by now.
            segment = self._saving.held(target.job, target.rank, target.session, target.segment_id)
            piece = request.data
            if not request.HasField("data") or len(piece) > PIECE_BYTES_MAX:
                raise InvalidRequestError(
                    f"an upload is one target, then pieces of at most {PIECE_BYTES_MAX} bytes"
                )
            if position + len(piece) > segment.size_bytes:
                raise InvalidRequestError(
                    f"the upload has more than the {segment.size_bytes} bytes of its segment"
                )
            segment.view[position : position + len(piece)] = piece
            position += len(piece)
        return tpb.UploadResponse(bytes=position)

    # --- steps -----------------------------------------------------------------------------------

    @answers
    async def ListSteps(self, request: tpb.ListStepsRequest, context: Context) -> tpb.ListStepsResponse:
        """Committed steps, linearizable; without a quorum, if that will do, those that the nodes hold complete."""
        _check_job(request.job)
        await self._owners.check(request.job)
        timeout_s = PROVISIONAL_LOOKUP_TIMEOUT_S if request.allow_provisional else LIST_TIMEOUT_S
        try:
            response = await self._registry.lookup(
                rpb.LookupRequest(job=request.job, rank=0), timeout_s=timeout_s
            )
        except NoQuorumError:
            if not request.allow_provisional:
                raise
            found = await self._restore.survey.steps(request.job, request.world_size)
            return tpb.ListStepsResponse(steps=[s.step for s in reversed(found)], provisional=True)
        return tpb.ListStepsResponse(steps=response.kept_steps)

    @answers
    async def Delete(
        self, request: tpb.TrainerServiceDeleteRequest, context: Context
    ) -> tpb.TrainerServiceDeleteResponse:
        """Keep committed steps no more."""
        _check_job(request.job)
        await self._owners.check(request.job)
        wanted = rpb.DeleteStepsRequest(
            job=request.job,
            step=request.step if request.HasField("step") else None,
            even_if_running=request.even_if_running,
        )
        done = await self._registry.delete_steps(wanted, LIST_TIMEOUT_S)
        return tpb.TrainerServiceDeleteResponse(deleted_steps=done.deleted_steps, kept_steps=done.kept_steps)

    async def Load(self, request: tpb.LoadRequest, context: Context) -> AsyncIterator[tpb.LoadResponse]:
        """Bring a step here and keep it while the stream is open."""
        try:
            _check_rank(request.job, request.rank, request.world_size)
            await self._owners.check(request.job)
            following = ProgressStream(partial(self._restore.bring, request), follow=request.follow)
            try:
                async for news in following.news():
                    yield (
                        tpb.LoadResponse(segment=news)
                        if isinstance(news, tpb.LoadSegment)
                        else tpb.LoadResponse(progress=news)
                    )
                loaded = following.result()
                if loaded is None:
                    yield tpb.LoadResponse(nothing=tpb.LoadNothing())
                    return
                yield tpb.LoadResponse(ready=loaded.ready)
                await asyncio.Event().wait()  # until the trainer cancels or dies
            finally:
                await following.close()
        except FastCheckdError as error:
            await abort(context, error)

    async def Pull(self, request: tpb.PullRequest, context: Context) -> AsyncIterator[tpb.PullResponse]:
        """A load whose bytes go through the stream."""
        try:
            load = request.load
            _check_rank(load.job, load.rank, load.world_size)
            await self._owners.check(load.job)
            following = ProgressStream(partial(self._restore.bring, load), follow=load.follow)
            try:
                async for news in following.news():
                    if isinstance(news, tpb.LoadProgress):
                        yield tpb.PullResponse(progress=news)
                loaded = following.result()
                if loaded is None:
                    yield tpb.PullResponse(nothing=tpb.LoadNothing())
                    return
                ready = loaded.ready
                ready.ClearField("segment")
                yield tpb.PullResponse(ready=ready)
                for low in range(0, ready.state_bytes, STREAM_PIECE_BYTES):
                    high = min(low + STREAM_PIECE_BYTES, ready.state_bytes)
                    yield tpb.PullResponse(data=bytes(loaded.segment.view[low:high]))
            finally:
                await following.close()
        except FastCheckdError as error:
            await abort(context, error)

    async def Read(self, request: tpb.ReadRequest, context: Context) -> AsyncIterator[tpb.ReadResponse]:
        """Bring parts of a step's states here and keep them while the stream is open, or send them."""
        try:
            _check_job(request.job)
            await self._owners.check(request.job)
            if request.step > STEP_MAX:
                raise InvalidRequestError(f"step {request.step} is not from 0 to {STEP_MAX}")
            following = ProgressStream(partial(self._restore.reading.read, request), follow=True)
            try:
                async for news in following.news():
                    if isinstance(news, tpb.LoadProgress):
                        yield tpb.ReadResponse(progress=news)
                read = following.result()
                if read is None:
                    yield tpb.ReadResponse(nothing=tpb.LoadNothing())
                    return
                yield tpb.ReadResponse(ready=read.ready)
                if not request.by_stream:
                    await asyncio.Event().wait()  # until the trainer cancels or dies
                for piece in read.pieces():
                    yield tpb.ReadResponse(data=piece)
            finally:
                await following.close()
        except FastCheckdError as error:
            await abort(context, error)


def _check_job(job: str) -> None:
    try:
        check_name("job", job)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None


def _check_rank(job: str, rank: int, world_size: int) -> None:
    _check_job(job)
    if not 1 <= world_size <= RANK_MAX:
        raise InvalidRequestError(f"world size {world_size} is not from 1 to {RANK_MAX}")
    if rank >= world_size:
        raise InvalidRequestError(f"rank {rank} is not below the world size {world_size}")


def _parsed(record: bytes, segment_id: str) -> tpb.Sealed | None:
    """A seal that was found in a segment; None: it is none that a trainer could have sent."""
    sealed = tpb.Sealed()
    try:
        sealed.ParseFromString(record)
    except DecodeError:
        return None
    if sealed.segment_id != segment_id or sealed.session or too_many_of_a_seal(sealed):
        return None
    return sealed
