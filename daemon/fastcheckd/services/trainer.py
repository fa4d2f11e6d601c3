"""TrainerService: what a trainer on this node, or one without a daemon of its own, asks of the data process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc.aio

from fastcheck_proto.conventions import HEADER_BYTES_MAX, RANK_MAX, STEP_MAX, STREAM_PIECE_BYTES, check_name
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheck_proto.v1 import trainer_pb2 as tpb
from fastcheck_proto.v1 import trainer_pb2_grpc as tpb_grpc

from ..errors import FastCheckdError, FencedError, InvalidRequestError, NoQuorumError
from ..registry.client import RegistryClient
from ..restore.following import Following
from ..restore.room import RestoreRoom
from ..restore.without_quorum import LOOKUP_TIMEOUT_S as PROVISIONAL_LOOKUP_TIMEOUT_S
from ..rpc import abort, answers
from ..saving.room import SavingRoom
from ..saving.save import Save
from .admission import CALLER
from .deletions import delete_steps
from .owners import Owners

#: Pieces of state that a sender may choose; ours are smaller.
PIECE_BYTES_MAX = 4 * STREAM_PIECE_BYTES
LIST_TIMEOUT_S = 10.0
#: A trainer that ends waits for it.
CLOSE_TIMEOUT_S = 1.5

Context = grpc.aio.ServicerContext[Any, Any]


class TrainerService(tpb_grpc.TrainerServiceServicer):
    """Serves trainers, near ones by segments and far ones by streams."""

    def __init__(
        self,
        saving: SavingRoom,
        restore: RestoreRoom,
        registry: RegistryClient,
        owners: Owners,
    ) -> None:
        self._owners = owners
        self._saving = saving
        self._restore = restore
        self._registry = registry

    @answers
    async def OpenSession(self, request: tpb.OpenSessionRequest, context: Context) -> tpb.OpenSessionResponse:
        """Take a rank's place."""
        _check_rank(request.job, request.rank, request.world_size)
        if not 1 <= len(request.client_id) <= 64:
            raise InvalidRequestError("client_id must have 1 to 64 characters")
        await self._owners.check(request.job)
        self._restore.expect(request.job, request.rank)
        return tpb.OpenSessionResponse(session=await self._saving.open_session(request, str(CALLER.get())))

    @answers
    async def CloseSession(
        self, request: tpb.CloseSessionRequest, context: Context
    ) -> tpb.CloseSessionResponse:
        """The trainer is done with its rank."""
        _check_job(request.job)
        await self._owners.check(request.job)
        await self._saving.close_session(request)
        closing = rpb.CloseRankRequest(job=request.job, rank=request.rank, session=request.session)
        await self._registry.close_rank(closing, timeout_s=CLOSE_TIMEOUT_S)
        return tpb.CloseSessionResponse()

    @answers
    async def BeginSave(self, request: tpb.BeginSaveRequest, context: Context) -> tpb.BeginSaveResponse:
        """Reserve a segment."""
        save, waited_s = await self._begin(request)
        return tpb.BeginSaveResponse(
            save_id=save.save_id,
            segment=tpb.SegmentRef(path=str(save.segment.path), bytes=save.segment.size_bytes),
            waited_s=waited_s,
            read_ahead=save.described is not None,
        )

    async def _begin(self, request: tpb.BeginSaveRequest) -> tuple[Save, float]:
        _check_rank(request.job, request.rank, request.world_size)
        await self._owners.check(request.job)
        if not 0 <= request.step <= STEP_MAX:
            raise InvalidRequestError(f"step {request.step} is not from 0 to {STEP_MAX}")
        if request.state_bytes == 0:
            raise InvalidRequestError("a state has at least its header")
        if request.ahead.header_bytes > HEADER_BYTES_MAX:
            raise InvalidRequestError(f"a state header may have at most {HEADER_BYTES_MAX} bytes")
        return await self._saving.begin(request)

    async def _check_save(self, save_id: str) -> None:
        """Whoever begins a save may end it; one that is not known is for the room to answer."""
        if (job := self._saving.job_of(save_id)) is not None:
            await self._owners.check(job)

    @answers
    async def SealSave(self, request: tpb.SealSaveRequest, context: Context) -> tpb.SealSaveResponse:
        """Start replicating."""
        await self._check_save(request.save_id)
        if request.as_begun:
            await self._saving.seal(request.save_id, None)
        else:
            await self._seal(request.save_id, request)
        return tpb.SealSaveResponse()

    async def _seal(self, save_id: str, seal: tpb.SealSaveRequest | tpb.PushSeal) -> None:
        if seal.header_bytes > HEADER_BYTES_MAX:
            raise InvalidRequestError(f"a state header may have at most {HEADER_BYTES_MAX} bytes")
        await self._saving.seal(save_id, seal)

    @answers
    async def AbandonSave(self, request: tpb.AbandonSaveRequest, context: Context) -> tpb.AbandonSaveResponse:
        """Give a segment back."""
        await self._check_save(request.save_id)
        self._saving.abandon(request.save_id)
        return tpb.AbandonSaveResponse()

    async def WatchSave(
        self, request: tpb.WatchSaveRequest, context: Context
    ) -> AsyncIterator[tpb.WatchSaveResponse]:
        """Follow a save."""
        try:
            _check_job(request.job)
            await self._owners.check(request.job)
            async for response in self._saving.watch(request):
                yield response
        except FastCheckdError as error:
            await abort(context, error)

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
        done = await delete_steps(self._registry, wanted, LIST_TIMEOUT_S)
        return tpb.TrainerServiceDeleteResponse(deleted_steps=done.deleted_steps, kept_steps=done.kept_steps)

    async def Load(self, request: tpb.LoadRequest, context: Context) -> AsyncIterator[tpb.LoadResponse]:
        """Bring a step here and keep it while the stream is open."""
        try:
            _check_rank(request.job, request.rank, request.world_size)
            await self._owners.check(request.job)
            following = Following(partial(self._restore.bring, request), follow=request.follow)
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

    @answers
    async def Push(
        self, request_iterator: AsyncIterator[tpb.PushRequest], context: Context
    ) -> tpb.PushResponse:
        """A save whose bytes come through the stream."""
        save: Save | None = None
        position = 0
        waited_s = 0.0
        sealed = False
        try:
            async for request in request_iterator:
                part = request.WhichOneof("part")
                if part == "begin" and save is None:
                    save, waited_s = await self._begin(request.begin)
                elif part == "data" and save is not None and not sealed:
                    piece = request.data
                    if not self._saving.is_reserved(save.save_id):
                        raise FencedError(
                            f"{save.key}: its memory was taken back, as another process took over the rank or this one "
                            "began another save"
                        )
                    if len(piece) > PIECE_BYTES_MAX or position + len(piece) > save.state_bytes:
                        raise InvalidRequestError("the stream holds more bytes than it announced")
                    save.segment.view[position : position + len(piece)] = piece
                    position += len(piece)
                elif part == "seal" and save is not None and not sealed:
                    # The job may have become somebody's meanwhile.
                    await self._check_save(save.save_id)
                    if position != save.state_bytes:
                        raise InvalidRequestError(f"{position} of {save.state_bytes} announced bytes came")
                    await self._seal(save.save_id, request.seal)
                    sealed = True
                else:
                    raise InvalidRequestError("a push is one begin, then data, then one seal")
            if not sealed:
                raise InvalidRequestError("the push ended before its seal")
        finally:
            if save is not None and not sealed:
                self._saving.abandon(save.save_id)
        return tpb.PushResponse(waited_s=waited_s)

    async def Pull(self, request: tpb.PullRequest, context: Context) -> AsyncIterator[tpb.PullResponse]:
        """A load whose bytes go through the stream."""
        try:
            load = request.load
            _check_rank(load.job, load.rank, load.world_size)
            await self._owners.check(load.job)
            following = Following(partial(self._restore.bring, load), follow=load.follow)
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
            following = Following(partial(self._restore.reading.read, request), follow=True)
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
