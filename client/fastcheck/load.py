"""Loads of one rank: which step, its bytes, and the caller's state filled from them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from fastcheck_proto.v1 import trainer_pb2 as pb

from .copier import contiguous_bytes
from .daemon import CONNECT_S
from .errors import (
    LoadFailedError,
    LossyCheckpointError,
    RegistryUnavailableError,
    SaveFailedError,
    WorldSizeError,
)
from .load_barrier import join_load, step_alone
from .progress import CallbackFailedError, LoadProgress, Reporter
from .replicated.whole import parse_shared
from .reshard import load_resharded
from .session import Session
from .state.fill import RelaidError, fill
from .step_reader import StepReader
from .transport import Loaded, Timeouts, Transport

logger = logging.getLogger("fastcheck")

#: A load of a large state over a slow network; a daemon that hangs is noticed long before.
_LOAD_S = 3600.0


class Loads:
    """All loads of a Checkpointer, under its lock, and how the last one went."""

    def __init__(self, session: Session, transport: Transport, ranks_s: float) -> None:
        """`ranks_s`: longest that other ranks are waited for."""
        self._session = session
        self._transport = transport
        self._ranks_s = ranks_s
        #: See the properties of Checkpointer with the same names.
        self.loaded_provisional = False
        self.loaded_own = True
        self.stats: dict[str, Any] = {}

    def load(
        self,
        state: object,
        step: int | None,
        *,
        lossy: bool,
        provisional: bool,
        together: bool,
        progress: Callable[[LoadProgress], None] | None,
    ) -> int | None:
        """Fill `state` with a step and return its number; `lossy` and `provisional`: whether such a one will do.

        Raises what `Checkpointer.load` does.
        """
        session = self._session
        self.loaded_provisional = False
        self.loaded_own = True
        barrier = None
        if together:
            barrier = join_load(
                session.job, session.rank, session.world_size, ranks_s=self._ranks_s, load_s=_LOAD_S
            )
        if barrier is None:
            if provisional and step is None and session.world_size > 1:
                step = step_alone(self._loadable(step, provisional), session.world_size)
                if step is None:
                    return None
            else:
                self._prepare(step, provisional)
            return self._load(
                state, self._request(step, provisional), lossy, Reporter(progress), lambda: None
            )
        with barrier:
            agreed = barrier.step(lambda: self._loadable(step, provisional))
            if agreed is None:
                return None
            return self._load(
                state, self._request(agreed, provisional), lossy, Reporter(progress), barrier.fill
            )

    def _request(self, step: int | None, provisional: bool) -> pb.LoadRequest:
        session = self._session
        return pb.LoadRequest(
            job=session.job,
            rank=session.rank,
            world_size=session.world_size,
            step=step,
            allow_provisional=provisional,
            follow=True,
        )

    def steps(self) -> list[int]:
        """Committed steps that can be loaded, oldest first."""
        self._session.daemon.find(self._session.timeout_s)
        return list(self._list_steps(pb.ListStepsRequest(job=self._session.job)).steps)

    def _load(
        self,
        state: object,
        request: pb.LoadRequest,
        lossy: bool,
        reporter: Reporter,
        agree: Callable[[], None],
    ) -> int | None:
        patience = Timeouts(CONNECT_S, _LOAD_S)
        started = time.monotonic()
        step = request.step if request.HasField("step") else None
        try:
            try:
                with self._transport.load(request, patience, allow_lossy=lossy, reporter=reporter) as loaded:
                    if loaded is None:
                        return None
                    step = loaded.ready.step
                    _fill(state, loaded, agree)
                    self._note_loaded(loaded.ready, time.monotonic() - started)
                    return step
            except (WorldSizeError, RelaidError) as error:
                logger.info("loading by parts, since the step was saved otherwise: %s", error)
            return self._reshard(state, step, lossy, reporter, agree)
        except SaveFailedError as error:
            # Codes about peers are the same in both directions.
            raise LoadFailedError(str(error)) from None
        except CallbackFailedError as error:
            assert error.__cause__ is not None
            raise error.__cause__ from None
        finally:
            reporter.close()

    def _reshard(
        self,
        state: object,
        step: int | None,
        lossy: bool,
        reporter: Reporter,
        agree: Callable[[], None],
    ) -> int:
        started = time.monotonic()
        session = self._session
        with StepReader(session.daemon, session.job, step, timeout_s=_LOAD_S) as reader:
            if reader.lossy and not lossy:
                raise LossyCheckpointError(
                    f"step {reader.step} was saved with a lossy coding (momentum= or weights= of its Checkpointer): "
                    "pass allow_lossy=True to load it, or load another step (see steps()); nothing was changed"
                )
            own = load_resharded(state, reader, session.rank, session.world_size, agree, reporter)
            self._note_own(reader.step, own)
            self.stats = {
                "step": reader.step,
                "bytes": reader.ranks[own].state_bytes,
                "local_bytes": reader.stats["local_bytes"],
                "fetched_bytes": reader.stats["fetched_bytes"],
                "holders": reader.stats["holders"],
                "bad_copies": reader.stats["bad_copies"],
                "restore_s": reader.stats["read_s"],
                "total_s": time.monotonic() - started,
                "saved_by": reader.world_size,
            }
            return reader.step

    def _prepare(self, step: int | None, allow_provisional: bool) -> None:
        """Find the daemon and take the rank's place; without a registry nobody can, and nobody else did.

        All ranks are to find the same newest step: none may be committed between their loads. One that they name is
        what it is.
        """
        self._session.daemon.find(self._session.timeout_s)
        try:
            if step is None:
                self._session.take_to_load()
            else:
                self._session.take_again()
        except RegistryUnavailableError as error:
            if not allow_provisional:
                raise RegistryUnavailableError(
                    f"{error}. Without it, the newest step that the nodes hold complete can be loaded, committed or "
                    "not: load(state, allow_provisional=True)"
                ) from None

    def _loadable(self, step: int | None, provisional: bool) -> tuple[list[int], bool]:
        """Steps that this rank could load now, and whether they were found without the registry.

        Of a step that the caller named it is not asked: the load will tell.
        """
        self._prepare(step, provisional)
        if step is not None:
            return [step], False
        session = self._session
        found = self._list_steps(
            pb.ListStepsRequest(
                job=session.job,
                allow_provisional=provisional,
                world_size=session.world_size if provisional else 0,
            )
        )
        return list(found.steps), found.provisional

    def _list_steps(self, request: pb.ListStepsRequest) -> pb.ListStepsResponse:
        session = self._session
        return session.daemon.list_steps(request, connect_s=CONNECT_S, timeout_s=session.timeout_s)

    def _note_loaded(self, ready: pb.LoadReady, total_s: float) -> None:
        self._note_own(ready.step, ready.header_rank if ready.parts else self._session.rank)
        self.loaded_provisional = ready.provisional
        self.stats = {
            "step": ready.step,
            "bytes": ready.state_bytes,
            "local_bytes": ready.local_bytes,
            "fetched_bytes": ready.fetched_bytes,
            "holders": ready.holders,
            "bad_copies": ready.bad_copies,
            "restore_s": ready.restore_s,
            "total_s": total_s,
            "saved_by": len(ready.parts) or self._session.world_size,
        }
        if ready.provisional:
            logger.warning(
                "step %d of job %s was loaded without the registry: it is complete and checked, but a newer step may "
                "have been committed",
                ready.step,
                self._session.job,
            )

    def _note_own(self, step: int, rank: int) -> None:
        self.loaded_own = rank == self._session.rank
        if not self.loaded_own:
            logger.warning(
                "rank %d had no part in step %d of job %s: what is per rank in it is that of rank %d; give this rank "
                "its own seed and its own place in the data",
                self._session.rank,
                step,
                self._session.job,
                rank,
            )


def _fill(state: object, loaded: Loaded, agree: Callable[[], None]) -> None:
    ready = loaded.ready
    header = loaded.state[ready.header_offset : ready.header_offset + ready.header_bytes]
    data = b"".join(contiguous_bytes(header, max(1, ready.header_bytes)))
    parsed = parse_shared(data, ready) if ready.parts else loaded.parse(data, ready.state_bytes)
    fill(state, parsed, loaded.state, loaded.pour, agree)
