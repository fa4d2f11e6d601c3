"""A stand-in for fastcheckd that speaks the trainer's wire and nothing behind it.

It exists for what a real daemon cannot be made to show on demand: streams that break, calls that are
refused, answers that make no sense. `Memory` outlives a daemon, as the RAM directory does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from fastcheck_proto.conventions import ERROR_METADATA_KEY
from fastcheck_proto.v1 import common_pb2, layout_pb2, node_pb2, node_pb2_grpc, trainer_pb2_grpc
from fastcheck_proto.v1 import trainer_pb2 as pb


@dataclass
class Saved:
    request: pb.BeginSaveRequest
    path: Path
    header_offset: int = 0
    header_bytes: int = 0
    sealed: bool = False
    layout: layout_pb2.StateLayout = field(default_factory=layout_pb2.StateLayout)
    watch: list[pb.WatchSaveResponse] = field(default_factory=list)


class Memory:
    """What survives a daemon."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.saves: dict[str, Saved] = {}
        self.sessions: dict[str, int] = {}
        self.loads: list[pb.LoadRequest] = []
        self.abandoned: list[str] = []
        self.closed: list[tuple[str, int, int]] = []
        self.segment_reuse = False
        self.changed = threading.Condition()

    def by_step(self, step: int) -> Saved | None:
        found = [s for s in self.saves.values() if s.sealed and s.request.step == step]
        return found[-1] if found else None

    def committed(self) -> list[int]:
        return sorted(
            s.request.step
            for s in self.saves.values()
            if s.sealed and any(w.state == pb.SAVE_STATE_COMMITTED for w in s.watch)
        )

    def tell(self, step: int, **update: object) -> None:
        """Let everyone who watches a step know something."""
        saved = self.by_step(step)
        assert saved is not None
        with self.changed:
            saved.watch.append(pb.WatchSaveResponse(**update))
            self.changed.notify_all()

    def commit(self, step: int) -> None:
        self.tell(
            step, state=pb.SAVE_STATE_COMMITTED, encoded_bytes=7, replicate_s=0.1, commit_s=0.2, copies=1
        )


class FakeDaemon(trainer_pb2_grpc.TrainerServiceServicer, node_pb2_grpc.NodeServiceServicer):
    def __init__(self, folder: Path, memory: Memory | None = None, *, auto_commit: bool = True) -> None:
        self.folder = folder
        self.memory = memory or Memory(folder)
        self.auto_commit = auto_commit
        self.refuse: dict[str, tuple[int, str]] = {}
        self.calls: list[str] = []
        #: No registry answers: loads that allow it are answered with what is there, others are refused.
        self.without_quorum = False
        self.spares: list[pb.SegmentRef] = []
        #: Sent before the answer of a load that asks to follow it.
        self.news: list[pb.LoadProgress | pb.LoadSegment] = []
        self.before_begin: Callable[[], object] = lambda: None
        self._stopping = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(self, self._server)
        node_pb2_grpc.add_NodeServiceServicer_to_server(self, self._server)
        self.socket = folder / "fastcheckd.sock"
        self._server.add_insecure_port(f"unix:{self.socket}")
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    @property
    def address(self) -> str:
        return f"unix://{self.socket}"

    @property
    def tcp_address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._stopping.set()
        with self.memory.changed:
            self.memory.changed.notify_all()
        self._server.stop(grace=0).wait()

    def __enter__(self) -> FakeDaemon:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _enter(self, name: str, context: grpc.ServicerContext, *, allowed: bool = False) -> None:
        self.calls.append(name)
        if self.without_quorum and not allowed and name in {"OpenSession", "ListSteps", "Load", "Pull"}:
            context.set_trailing_metadata(((ERROR_METADATA_KEY, "ERROR_CODE_NO_QUORUM"),))
            context.abort(grpc.StatusCode.UNAVAILABLE, "no leader answers")
        if name in self.refuse:
            code, sentence = self.refuse[name]
            context.set_trailing_metadata(((ERROR_METADATA_KEY, common_pb2.ErrorCode.Name(code)),))
            context.abort(grpc.StatusCode.ABORTED, sentence)

    # NodeService

    def Describe(self, request, context):
        self._enter("Describe", context)
        return node_pb2.DescribeResponse(
            node_id="fake", data_socket=str(self.socket), data_address=f"127.0.0.1:{self.port}"
        )

    # TrainerService

    def OpenSession(self, request, context):
        self._enter("OpenSession", context)
        sessions = self.memory.sessions
        return pb.OpenSessionResponse(session=sessions.setdefault(request.client_id, len(sessions) + 1))

    def CloseSession(self, request, context):
        self._enter("CloseSession", context)
        self.memory.closed.append((request.job, request.rank, request.session))
        return pb.CloseSessionResponse()

    def _begin(self, request: pb.BeginSaveRequest) -> tuple[str, Saved]:
        save_id = f"save-{len(self.memory.saves)}"
        name = "one.seg" if self.memory.segment_reuse else f"{save_id}.seg"
        path = self.memory.folder / name
        size = -(-request.state_bytes // 4096) * 4096
        if not path.exists() or path.stat().st_size < size:
            path.write_bytes(bytes(size))
        saved = self.memory.saves[save_id] = Saved(request, path)
        return save_id, saved

    def _seal(self, saved: Saved, seal) -> None:
        saved.header_offset, saved.header_bytes = seal.header_offset, seal.header_bytes
        saved.layout.CopyFrom(seal.layout)
        saved.sealed = True
        saved.watch.append(pb.WatchSaveResponse(state=pb.SAVE_STATE_STAGED, spares=self.spares))
        if self.auto_commit:
            self.memory.commit(saved.request.step)

    def BeginSave(self, request, context):
        self._enter("BeginSave", context)
        self.before_begin()
        save_id, saved = self._begin(request)
        segment = pb.SegmentRef(path=str(saved.path), bytes=saved.path.stat().st_size)
        return pb.BeginSaveResponse(save_id=save_id, segment=segment, waited_s=0.25)

    def SealSave(self, request, context):
        self._enter("SealSave", context)
        self._seal(self.memory.saves[request.save_id], request)
        return pb.SealSaveResponse()

    def AbandonSave(self, request, context):
        self._enter("AbandonSave", context)
        self.memory.abandoned.append(request.save_id)
        return pb.AbandonSaveResponse()

    def WatchSave(self, request, context):
        self._enter("WatchSave", context)
        saved = self.memory.by_step(request.step)
        if saved is None:
            context.set_trailing_metadata(((ERROR_METADATA_KEY, "ERROR_CODE_NOT_FOUND"),))
            context.abort(grpc.StatusCode.NOT_FOUND, "no such save")
        told: list[pb.WatchSaveResponse] = []
        while context.is_active() and not self._stopping.is_set():
            with self.memory.changed:
                self.memory.changed.wait_for(
                    lambda: len(saved.watch) > len(told) or self._stopping.is_set(), timeout=0.5
                )
                news = saved.watch[len(told) :]
            for update in news:
                yield update
                told.append(update)
                if update.state in (pb.SAVE_STATE_COMMITTED, pb.SAVE_STATE_FAILED):
                    return
        context.abort(grpc.StatusCode.UNAVAILABLE, "stopping")

    def ListSteps(self, request, context):
        self._enter("ListSteps", context, allowed=request.allow_provisional)
        return pb.ListStepsResponse(steps=self.memory.committed(), provisional=self.without_quorum)

    def _ready(self, request: pb.LoadRequest, context) -> tuple[pb.LoadReady, Saved] | None:
        self.memory.loads.append(request)
        steps = self.memory.committed()
        if not steps and not request.HasField("step"):
            return None
        step = request.step if request.HasField("step") else steps[-1]
        if step not in steps:
            context.set_trailing_metadata(((ERROR_METADATA_KEY, "ERROR_CODE_NOT_FOUND"),))
            context.abort(grpc.StatusCode.NOT_FOUND, f"step {step} is not kept")
        saved = self.memory.by_step(step)
        return pb.LoadReady(
            step=step,
            state_bytes=saved.request.state_bytes,
            header_offset=saved.header_offset,
            header_bytes=saved.header_bytes,
            lossy=saved.layout.HasField("precision"),
            provisional=self.without_quorum,
        ), saved

    def Load(self, request, context):
        self._enter("Load", context, allowed=request.allow_provisional)
        found = self._ready(request, context)
        if found is None:
            yield pb.LoadResponse(nothing=pb.LoadNothing())
            return
        ready, saved = found
        ready.segment.path, ready.segment.bytes = str(saved.path), saved.path.stat().st_size
        for news in self.news if request.follow else ():
            if isinstance(news, pb.LoadSegment):
                yield pb.LoadResponse(segment=news)
            else:
                yield pb.LoadResponse(progress=news)
        try:
            yield pb.LoadResponse(ready=ready)
            self.calls.append("Load open")
            while context.is_active() and not self._stopping.is_set():
                time.sleep(0.01)
        finally:  # gRPC drops a stream whose caller has gone before it was asked for more
            self.calls.append("Load closed")

    def Read(self, request, context):
        self._enter("Read", context)
        yield pb.ReadResponse(nothing=pb.LoadNothing())

    def Push(self, requests, context):
        self._enter("Push", context)
        begin = next(requests).begin
        _, saved = self._begin(begin)
        data = bytearray()
        for message in requests:
            if message.HasField("seal"):
                assert len(data) + 0 == begin.state_bytes
                saved.path.write_bytes(bytes(data))
                self._seal(saved, message.seal)
            else:
                assert len(message.data) <= 512 * 1024
                data += message.data
        return pb.PushResponse(waited_s=0.25)

    def Pull(self, request, context):
        self._enter("Pull", context, allowed=request.load.allow_provisional)
        found = self._ready(request.load, context)
        if found is None:
            yield pb.PullResponse(nothing=pb.LoadNothing())
            return
        ready, saved = found
        for news in self.news if request.load.follow else ():
            if isinstance(news, pb.LoadProgress):
                yield pb.PullResponse(progress=news)
        yield pb.PullResponse(ready=ready)
        data = saved.path.read_bytes()[: ready.state_bytes]
        for start in range(0, len(data), 512 * 1024):
            yield pb.PullResponse(data=data[start : start + 512 * 1024])
