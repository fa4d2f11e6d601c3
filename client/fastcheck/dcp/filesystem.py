"""`fastcheck://job/step-N/file` through fsspec: what DCP uses by itself for a URL, with no class passed.

DCP's file writer makes one file per rank and, from the coordinator, a metadata file that it renames when it is whole. A
step of W such ranks is a FastCheck step of W + 1: rank r has the file that rank r wrote, saved when it is closed, W has
the metadata, saved when it gets its name. So the registry commits exactly when DCP has finished, and what is not
committed is not seen by anybody.

With `use_collectives=False` there is no coordinator, and each rank writes metadata of its own. Such a step has W ranks:
a rank's file waits for its metadata, and both are saved when that gets its name. docs/dcp.md, "The URL".
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from fsspec.spec import AbstractFileSystem

from fastcheck_proto.v1 import trainer_pb2 as pb

from ..admin import AdminClient
from ..config import resolve
from ..connection import parse_address
from ..daemon import PATIENT_CONNECT_S, Daemon
from ..errors import (
    InvalidArgumentError,
    LossyCheckpointError,
    SaveTimeoutError,
    StepNotFoundError,
)
from ..handle import SaveHandle
from ..step_reader import StepReader
from .checkpoint_id import PROTOCOL, StepPath, parse_path
from .checkpointer_pool import CheckpointerOptions, checkpointer_of, close_job
from .files import Spool, StepFile, StepFiles

METADATA = ".metadata"
#: A rank's own, without collectives. Before it writes anything each rank looks whether rank 0's is there.
_RANK_METADATA = re.compile(r"__([0-9]{1,7})\.metadata")
_FIRST_METADATA = "__0.metadata"
_RANK_FILE = re.compile(r"__([0-9]{1,7})_([0-9]{1,7})\.distcp")
#: Steps that this process is about to save without collectives; one that fails leaves its own behind.
_LOOKS_MAX = 16
#: All ranks have written when the metadata is: the step is committed at once, or something is missing.
_COMMIT_S = 120.0


class FastCheckFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec ships no types
    """Jobs, their committed steps, and the files in those.

    Args:
        address: Of the daemon, as of `Checkpointer`.
        allow_lossy: Whether files of steps that were saved with a lossy coding may be read.
        timeout_s: Longest wait for a file's copies, and for reading from one.
    """

    protocol = PROTOCOL

    def __init__(
        self,
        address: str | None = None,
        allow_lossy: bool = False,
        timeout_s: float = 1800.0,
        **storage_options: Any,
    ) -> None:
        super().__init__(**storage_options)
        self.address = address
        self.allow_lossy = allow_lossy
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._daemon: Daemon | None = None
        #: Metadata files that have not got their names yet, by path.
        self._unnamed: dict[str, Spool] = {}
        #: (job, step) that ranks save without collectives, and this rank's file once it is closed.
        self._without_collectives: OrderedDict[tuple[str, int], Spool | None] = OrderedDict()

    # -- what there is

    def ls(self, path: str, detail: bool = True, **_options: Any) -> list[Any]:
        """Jobs, a job's committed steps, or a step's files.

        Raises:
            FileNotFoundError: there is no such job, or no such committed step.
        """
        path = self._strip_protocol(path)
        place = parse_path(path)
        if place.job is None:
            with AdminClient(resolve("any", 0, 1, self.address).address) as admin:
                found = [_folder(job["job"]) for job in admin.jobs()["jobs"]]
        elif place.step is None:
            found = [_folder(f"{place.job}/step-{step}") for step in self._steps(place.job)]
            if not found:
                raise FileNotFoundError(f"no step of job {place.job!r} is committed")
        else:
            files = self._files(place.job, place.step)
            base = f"{place.job}/step-{place.step}"
            found = [
                {"name": f"{base}/{name}", "size": record.bytes, "type": "file"}
                for name, (_, record) in sorted(files.stored.items())
                if place.file in (None, name)
            ]
            if place.file is not None and not found:
                raise FileNotFoundError(f"{PROTOCOL}://{path} is not among the files of its step")
        return found if detail else [each["name"] for each in found]

    def info(self, path: str, **_options: Any) -> dict[str, Any]:
        """Name, size in bytes and type.

        Raises:
            FileNotFoundError: it is not there, or not committed.
        """
        path = self._strip_protocol(path)
        place = parse_path(path)
        if place.file is not None:
            try:
                found: dict[str, Any] = self.ls(path)[0]
            except FileNotFoundError:
                self._note_a_look(place)
                raise
            return found
        if place.job is not None:
            steps = self._steps(place.job)
            if not steps or place.step not in (None, *steps):
                raise FileNotFoundError(f"{PROTOCOL}://{path} is not committed; steps that are: {steps}")
        return _folder(path)

    def exists(self, path: str, **_options: Any) -> bool:
        """Whether it is there and committed.

        Raises:
            FastCheckError: nobody can say; "no" would be believed.
        """
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Steps need no making: checks that the path names one."""
        if parse_path(self._strip_protocol(path)).step is None:
            raise InvalidArgumentError(
                f"{path!r} names no step: use '{PROTOCOL}://JOB/step-100' as checkpoint_id"
            )

    mkdir = makedirs

    # -- files

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        place = parse_path(path)
        if place.job is None or place.step is None or place.file is None:
            raise InvalidArgumentError(
                f"{PROTOCOL}://{path} is no file: they are {PROTOCOL}://JOB/step-100/FILE"
            )
        if mode == "rb":
            files = self._files(place.job, place.step)
            if place.file not in files.stored:
                raise FileNotFoundError(f"{PROTOCOL}://{path} is not among the files of its step")
            if files.reader.lossy and not self.allow_lossy:
                raise LossyCheckpointError(
                    f"{PROTOCOL}://{path} is of a step that was saved with a lossy coding: open it with "
                    "allow_lossy=True"
                )
            return StepFile(self, path, files, place.file)
        if mode not in ("wb", "xb"):
            raise InvalidArgumentError(
                f"mode {mode!r}: files are read (rb) or written at once (wb), never changed"
            )
        if place.file == METADATA or place.file.endswith(METADATA + ".tmp"):
            return Spool(path, self._metadata_closed)
        written = _RANK_FILE.fullmatch(place.file)
        if written is None or int(written[2]):
            raise InvalidArgumentError(
                f"{place.file!r} cannot be written: a step takes one file of each rank (__RANK_0.distcp) and "
                f"{METADATA}, as torch.distributed.checkpoint writes them by itself. For others (thread_count, "
                "single_file_per_rank=False) pass fastcheck.dcp.FastCheckWriter"
            )
        rank = int(written[1])
        return Spool(path, lambda spool: self._file_closed(spool, place, rank))

    def mv(self, path1: str, path2: str, *_args: Any, **_options: Any) -> None:
        """Give a metadata file its name: with that the step is committed.

        Raises:
            FastCheckError: it is not, and why.
            FileNotFoundError: nothing was written under that name here.
        """
        path1, path2 = self._strip_protocol(path1), self._strip_protocol(path2)
        place = parse_path(path2)
        own = _RANK_METADATA.fullmatch(place.file or "")
        if place.file != METADATA and own is None:
            raise InvalidArgumentError(
                f"{PROTOCOL}://{path1} cannot be renamed to {place.file!r}: only metadata files are ({METADATA}, or "
                "__RANK.metadata without collectives)"
            )
        with self._lock:
            spool = self._unnamed.pop(path1, None)
        if spool is None:
            raise FileNotFoundError(
                f"{PROTOCOL}://{path1} was not written here: committed files keep their names"
            )
        if own is None:
            self._commit({METADATA: spool}, place, _world_size(), _world_size() + 1)
        else:
            self._commit_own(spool, place, int(own[1]))

    def rm_file(self, path: str) -> None:
        """Drop a metadata file that has no name yet, or delete a committed step.

        Raises:
            FileNotFoundError: it is not there.
            InvalidArgumentError: it is one file of a committed step, which goes as a whole, or a job.
            UnsafeError: as `rm`.
        """
        self._remove(self._strip_protocol(path), recursive=False, even_if_running=False)

    def rm(
        self,
        path: str | list[str],
        recursive: bool = False,
        maxdepth: int | None = None,
        even_if_running: bool = False,
    ) -> None:
        """Delete committed steps, or with `recursive` all of a job; as `rm_file` for files.

        Args:
            even_if_running: Also what a running trainer would be restored from: the newest step, or all of a job. What
                it has under way is refused, then it saves on. This process' own savers by URL are closed where all of
                a job goes, and do not count as running.

        Raises:
            FileNotFoundError: it is not there.
            InvalidArgumentError: a single file of a committed step, or a job without `recursive`.
            UnsafeError: the job seems to be running; or not all voters run a version that can delete.
        """
        for each in path if isinstance(path, list) else [path]:
            self._remove(self._strip_protocol(each), recursive=recursive, even_if_running=even_if_running)

    def _remove(self, path: str, *, recursive: bool, even_if_running: bool) -> None:
        with self._lock:
            if self._unnamed.pop(path, None) is not None:
                return
        place = parse_path(path)
        self.info(path)  # raises FileNotFoundError
        if place.job is None or place.file is not None:
            raise InvalidArgumentError(
                f"{PROTOCOL}://{path} cannot be removed by itself: a committed step goes as a whole "
                f"({PROTOCOL}://JOB/step-100)"
            )
        if place.step is None:
            if not recursive:
                raise InvalidArgumentError(
                    f"{PROTOCOL}://{path} is a job: say recursive=True to delete all of its steps"
                )
            close_job(place.job)
        request = pb.TrainerServiceDeleteRequest(
            job=place.job, step=place.step, even_if_running=even_if_running
        )
        self._connected().delete(request, connect_s=PATIENT_CONNECT_S, timeout_s=60.0)

    def _note_a_look(self, place: StepPath) -> None:
        """DCP's writer looks for what is there before it writes: for rank 0's own metadata if each rank has some."""
        if place.job is not None and place.step is not None and place.file in (METADATA, _FIRST_METADATA):
            with self._lock:
                if place.file == METADATA:
                    self._without_collectives.pop((place.job, place.step), None)
                else:  # rank 0 looks again before it renames its own
                    self._without_collectives.setdefault((place.job, place.step))
                while len(self._without_collectives) > _LOOKS_MAX:
                    self._without_collectives.popitem(last=False)

    def _metadata_closed(self, spool: Spool) -> None:
        place = parse_path(spool.path)
        if place.file == METADATA:
            self._commit({METADATA: spool}, place, _world_size(), _world_size() + 1)
        else:
            with self._lock:
                self._unnamed[spool.path] = spool

    def _file_closed(self, spool: Spool, place: StepPath, rank: int) -> None:
        assert place.job is not None
        assert place.step is not None
        _check_rank(spool, rank)
        with self._lock:
            waits = (place.job, place.step) in self._without_collectives
            if waits:
                self._without_collectives[place.job, place.step] = spool
        if not waits:
            self._save({_name_of(spool): spool}, place, rank, _world_size() + 1)

    def _commit_own(self, metadata: Spool, place: StepPath, rank: int) -> None:
        """Save a rank's file and its metadata, and wait until all ranks have."""
        assert place.job is not None
        assert place.step is not None
        _check_rank(metadata, rank)
        with self._lock:
            spool = self._without_collectives.pop((place.job, place.step), None)
        if spool is None:
            raise InvalidArgumentError(
                f"{PROTOCOL}://{metadata.path} is a rank's own metadata, and its file was saved as one of a step with "
                "collectives: this version of torch saves in another way than it was tried with; pass "
                "fastcheck.dcp.FastCheckWriter"
            )
        assert place.file is not None
        self._commit({_name_of(spool): spool, place.file: metadata}, place, rank, _world_size())

    def _save(self, files: Mapping[str, Spool], place: StepPath, rank: int, world_size: int) -> SaveHandle:
        """Save files as the state of a rank; returns when they are replicated."""
        assert place.job is not None
        assert place.step is not None
        state = {"files": {name: spool.tensor() for name, spool in files.items()}}
        with checkpointer_of(
            place.job, rank, world_size, CheckpointerOptions(address=self.address)
        ) as checkpointer:
            handle = checkpointer.save(place.step, state)
            handle.wait_replicated(self.timeout_s)
        return handle

    def _commit(self, files: Mapping[str, Spool], place: StepPath, rank: int, world_size: int) -> None:
        """Save the files that the step waits for, and return when it is committed."""
        handle = self._save(files, place, rank, world_size)
        try:
            handle.result(timeout=min(_COMMIT_S, self.timeout_s))
        except SaveTimeoutError as error:
            raise SaveTimeoutError(
                f"{error}. The URL needs all {_world_size()} ranks of the process group to save; for a part of them "
                "(process_group=, no_dist=True) pass fastcheck.dcp.FastCheckWriter"
            ) from None

    # -- the daemon

    def _connected(self) -> Daemon:
        with self._lock:
            if self._daemon is None:
                where = resolve("any", rank=0, world_size=1, address=self.address).address
                self._daemon = Daemon(parse_address(where))
            return self._daemon

    def _steps(self, job: str) -> list[int]:
        request = pb.ListStepsRequest(job=job)
        return list(self._connected().list_steps(request, connect_s=PATIENT_CONNECT_S, timeout_s=60.0).steps)

    def _files(self, job: str, step: int) -> StepFiles:
        reader = StepReader(self._connected(), job, step, timeout_s=self.timeout_s)
        try:
            reader.__enter__()
        except StepNotFoundError as error:
            raise FileNotFoundError(f"{error}; committed steps of job {job!r}: {self._steps(job)}") from None
        return StepFiles.of(reader)


def _name_of(spool: Spool) -> str:
    return spool.path.rpartition("/")[2]


def _check_rank(spool: Spool, rank: int) -> None:
    if rank >= _world_size():
        raise InvalidArgumentError(
            f"{spool.path!r} is of rank {rank}, but there are {_world_size()}: pass fastcheck.dcp.FastCheckWriter"
        )


def _folder(name: str) -> dict[str, Any]:
    return {"name": name, "size": 0, "type": "directory"}


def _world_size() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1
