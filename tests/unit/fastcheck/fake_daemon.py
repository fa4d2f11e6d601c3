"""A stand-in for fastcheckd that speaks the trainer's wire and nothing behind it.

It exists for what a real daemon cannot be made to show on demand: streams that break, calls that are
refused, answers that make no sense. `Memory` outlives a daemon, as the RAM directory does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from fastcheck_proto.conventions import ERROR_METADATA_KEY
from fastcheck_proto.seal_record import read_record
from fastcheck_proto.v1 import common_pb2, node_pb2, node_pb2_grpc, trainer_pb2_grpc
from fastcheck_proto.v1 import trainer_pb2 as pb


@dataclass
class Saved:
    """A segment: lent, and perhaps sealed."""

    segment_id: str
    path: Path
    session: int
    sealed: pb.Sealed | None = None
    watch: list[pb.SaveProgress] = field(default_factory=list)


class Memory:
    """What survives a daemon."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: By the name that a segment was lent under.
        self.saves: dict[str, Saved] = {}
        self.sessions: dict[str, int] = {}
        self.opened: list[pb.OpenSession] = []
        self.reserved: list[pb.ReserveMemory] = []
        self.loads: list[pb.LoadRequest] = []
        self.abandoned: list[str] = []
        self.closed: list[tuple[str, int, int]] = []
        self.segment_reuse = False
        self.changed = threading.Condition()

    def all_sealed(self) -> list[Saved]:
        return [s for s in self.saves.values() if s.sealed is not None]

    def by_step(self, step: int) -> Saved | None:
        found = [s for s in self.all_sealed() if s.sealed.step == step]
        return found[-1] if found else None

    def committed(self) -> list[int]:
        return sorted(
            s.sealed.step
            for s in self.all_sealed()
            if any(w.state == pb.SAVE_STATE_COMMITTED for w in s.watch)
        )

    def tell(self, step: int, **update: object) -> None:
        """Let everyone who watches a step know something."""
        with self.changed:
            self.changed.wait_for(lambda: self.by_step(step) is not None, 20)
            saved = self.by_step(step)
            assert saved is not None
            saved.watch.append(pb.SaveProgress(session=saved.session, step=step, **update))
            self.changed.notify_all()

    def commit(self, step: int) -> None:
        self.tell(
            step, state=pb.SAVE_STATE_COMMITTED, encoded_bytes=7, replicate_s=0.1, commit_s=0.2, copies=1
        )


class Tenure:
    """One trainer's stream, from the daemon's side."""

    def __init__(self, daemon: FakeDaemon, session: int, in_flight: int) -> None:
        self.daemon = daemon
        self.memory = daemon.memory
        self.session = session
        self.in_flight = in_flight
        self.held: dict[str, Saved] = {}
        self.followed: list[tuple[Saved, int]] = []
        self.outgoing: list[pb.DaemonMessage] = []
        self.segment_bytes = 0
        self.under_way = 0
        self.over = False

    def say(self, **event: object) -> None:
        with self.memory.changed:
            self.outgoing.append(pb.DaemonMessage(clock_s=time.monotonic(), **event))
            self.memory.changed.notify_all()

    def refuse(self, name: str, step: int | None) -> bool:
        if name not in self.daemon.refuse:
            return False
        code, sentence = self.daemon.refuse[name]
        error = common_pb2.ErrorDetail(code=code, message=sentence)
        self.say(refused=pb.Refused(step=step, session=self.session, error=error))
        return True

    def offer(self) -> None:
        with self.memory.changed:  # two threads offer
            while self.segment_bytes and len(self.held) + self.under_way < self.in_flight:
                segment_id = f"save-{len(self.memory.saves)}"
                name = "one.seg" if self.memory.segment_reuse else f"{segment_id}.seg"
                path = self.memory.folder / name
                if not path.exists() or path.stat().st_size < self.segment_bytes:
                    path.write_bytes(bytes(self.segment_bytes))
                saved = Saved(segment_id, path, self.session)
                self.memory.saves[segment_id] = self.held[segment_id] = saved
                ref = pb.SegmentRef(path=str(path), bytes=path.stat().st_size)
                answer = self.daemon.instead_of(ref)
                self.say(segment=pb.OfferedSegment(segment_id=segment_id, segment=answer))

    def listen(self, requests: Iterator[pb.TrainerMessage]) -> None:
        try:
            for message in requests:
                self.hear(message)
        except Exception:  # noqa: BLE001  gRPC's, when the stream is over
            pass
        if not self.daemon.stopping:
            with self.memory.changed:  # another thread may still offer
                held = list(self.held.items())
            for segment_id, saved in held:
                body = read_record(memoryview(saved.path.read_bytes()), segment_id)
                if body is not None:
                    self.seal(saved, pb.Sealed.FromString(body))
        with self.memory.changed:
            self.over = True
            self.memory.changed.notify_all()

    def hear(self, message: pb.TrainerMessage) -> None:
        kind = message.WhichOneof("message")
        self.daemon.calls.append(kind)
        if kind == "reserve":
            self.memory.reserved.append(message.reserve)
            if not self.refuse("reserve", message.reserve.step if message.reserve.HasField("step") else None):
                self.daemon.before_reserve()
                size = message.reserve.state_bytes + message.reserve.record_bytes
                self.segment_bytes = max(self.segment_bytes, -(-size // 4096) * 4096)
                self.say(
                    reserved=pb.Reserved(segments=4, bytes=4 * self.segment_bytes, offered=self.in_flight)
                )
                self.offer()
        elif kind == "sealed":
            sealed = message.sealed
            saved = self.held.pop(sealed.segment_id, None)
            if self.refuse("sealed", sealed.step):
                self.offer()
            elif saved is not None:
                self.seal(saved, sealed)
            elif (known := self.memory.by_step(sealed.step)) is not None:
                self.followed.append((known, 0))
                self.say()
            else:
                error = common_pb2.ErrorDetail(code=common_pb2.ERROR_CODE_NOT_FOUND, message="no such save")
                number = sealed.session or self.session
                self.say(refused=pb.Refused(step=sealed.step, session=number, error=error))
        elif kind == "abandon":
            self.held.pop(message.abandon.segment_id, None)
            self.memory.abandoned.append(message.abandon.segment_id)
            self.offer()
        elif kind == "close":
            self.memory.closed.append((self.daemon.job, self.daemon.rank, self.session))
            with self.memory.changed:
                self.over = True
                self.memory.changed.notify_all()

    def seal(self, saved: Saved, sealed: pb.Sealed) -> None:
        saved.sealed = sealed
        self.under_way += 1
        with self.memory.changed:
            staged = pb.SaveProgress(session=self.session, step=sealed.step, state=pb.SAVE_STATE_STAGED)
            saved.watch.append(staged)
            self.followed.append((saved, 0))
            self.memory.changed.notify_all()
        if self.daemon.auto_commit:
            self.memory.commit(sealed.step)

    def news(self) -> list[pb.DaemonMessage]:
        """With the lock held: what the trainer has not been told yet."""
        found, self.outgoing = self.outgoing, []
        for at, (saved, told) in enumerate(self.followed):
            for update in saved.watch[told:]:
                found.append(pb.DaemonMessage(clock_s=time.monotonic(), progress=update))
                if update.state in (pb.SAVE_STATE_COMMITTED, pb.SAVE_STATE_FAILED):
                    self.under_way = max(0, self.under_way - 1)
            self.followed[at] = (saved, len(saved.watch))
        return found


class FakeDaemon(trainer_pb2_grpc.TrainerServiceServicer, node_pb2_grpc.NodeServiceServicer):
    def __init__(self, folder: Path, memory: Memory | None = None, *, auto_commit: bool = True) -> None:
        self.folder = folder
        self.memory = memory or Memory(folder)
        self.auto_commit = auto_commit
        self.refuse: dict[str, tuple[int, str]] = {}
        self.calls: list[str] = []
        #: No registry answers: loads that allow it are answered with what is there, others are refused.
        self.without_quorum = False
        #: What is offered in the place of a segment.
        self.instead_of: Callable[[pb.SegmentRef], pb.SegmentRef] = lambda ref: ref
        #: Sent before the answer of a load that asks to follow it.
        self.news: list[pb.LoadProgress | pb.LoadSegment] = []
        self.before_reserve: Callable[[], object] = lambda: None
        self.job, self.rank = "", 0
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

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

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
        if self.without_quorum and not allowed and name in {"Session", "ListSteps", "Load", "Pull"}:
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

    def Session(self, requests, context):
        self._enter("Session", context)
        opening = next(requests).open
        memory = self.memory
        memory.opened.append(opening)
        self.job, self.rank = opening.job, opening.rank
        session = memory.sessions.setdefault(opening.client_id, len(memory.sessions) + 1)
        tenure = Tenure(self, session, opening.max_in_flight or 2)
        tenure.say(opened=pb.Opened(session=session))
        threading.Thread(target=tenure.listen, args=(requests,), daemon=True).start()
        while context.is_active() and not self.stopping:
            with memory.changed:
                news = tenure.news()
                if not news and not tenure.over:
                    memory.changed.wait(0.5)
                    news = tenure.news()
            yield from news
            tenure.offer()
            if tenure.over:
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
            state_bytes=saved.sealed.state_bytes,
            header_offset=saved.sealed.header_offset,
            header_bytes=saved.sealed.header_bytes,
            lossy=saved.sealed.layout.HasField("precision"),
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

    def Upload(self, requests, context):
        self._enter("Upload", context)
        target = next(requests).target
        saved = self.memory.saves[target.segment_id]
        assert saved.session == target.session and saved.sealed is None
        data = bytearray()
        for message in requests:
            assert 0 < len(message.data) <= 512 * 1024
            data += message.data
        with saved.path.open("r+b") as file:
            file.write(data)
        return pb.UploadResponse(bytes=len(data))

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
