"""Loads of one rank: which step, its bytes, and the caller's state filled from them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from fastcheck_proto.v1 import trainer_pb2 as pb

from .agreeing import agree_on_step
from .copying import contiguous_bytes
from .daemon import CONNECT_S
from .errors import LoadFailedError, RegistryUnavailableError, SaveFailedError
from .progress import CallbackFailedError, LoadProgress, Reporter
from .replicated.whole import parse_shared
from .seat import Seat
from .state.fill import fill
from .transport import Loaded, Patience, Transport

logger = logging.getLogger("fastcheck")

#: A load of a large state over a slow network; a daemon that hangs is noticed long before.
_LOAD_S = 3600.0


class Loads:
    """All loads of a Checkpointer, under its lock, and how the last one went."""

    def __init__(self, seat: Seat, transport: Transport) -> None:
        self._seat = seat
        self._transport = transport
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
        progress: Callable[[LoadProgress], None] | None,
    ) -> int | None:
        """Fill `state` with a step and return its number; `lossy` and `provisional`: whether such a one will do.

        Raises what `Checkpointer.load` does.
        """
        seat = self._seat
        self.loaded_provisional = False
        self.loaded_own = True
        if provisional and step is None and seat.world_size > 1:
            step = agree_on_step(self._loadable, seat.rank, seat.world_size)
            if step is None:
                return None
        else:
            self._prepare(provisional)
        request = pb.LoadRequest(
            job=seat.job,
            rank=seat.rank,
            world_size=seat.world_size,
            step=step,
            allow_provisional=provisional,
            follow=True,
        )
        return self._load(state, request, lossy, Reporter(progress))

    def steps(self) -> list[int]:
        """Committed steps that can be loaded, oldest first."""
        self._seat.find_daemon()
        return list(self._list_steps(pb.ListStepsRequest(job=self._seat.job)).steps)

    def _load(self, state: object, request: pb.LoadRequest, lossy: bool, reporter: Reporter) -> int | None:
        patience = Patience(CONNECT_S, _LOAD_S)
        started = time.monotonic()
        try:
            with self._transport.load(request, patience, allow_lossy=lossy, reporter=reporter) as loaded:
                if loaded is None:
                    return None
                number = _fill(state, loaded)
                self._note_loaded(loaded.ready, time.monotonic() - started)
                return number
        except SaveFailedError as error:
            # Codes about peers are the same in both directions.
            raise LoadFailedError(str(error)) from None
        except CallbackFailedError as error:
            assert error.__cause__ is not None
            raise error.__cause__ from None
        finally:
            reporter.close()

    def _prepare(self, allow_provisional: bool) -> None:
        """Find the daemon and take the rank's place; without a registry nobody can, and nobody else did."""
        self._seat.find_daemon()
        try:
            self._seat.take(Patience(CONNECT_S, self._seat.timeout_s))
        except RegistryUnavailableError as error:
            if not allow_provisional:
                raise RegistryUnavailableError(
                    f"{error}. Without it, the newest step that the nodes hold complete can be loaded, committed or "
                    "not: load(state, allow_provisional=True)"
                ) from None

    def _loadable(self) -> tuple[list[int], bool]:
        """Steps that this rank could load now, and whether they were found without the registry."""
        self._prepare(allow_provisional=True)
        seat = self._seat
        found = self._list_steps(
            pb.ListStepsRequest(job=seat.job, allow_provisional=True, world_size=seat.world_size)
        )
        return list(found.steps), found.provisional

    def _list_steps(self, request: pb.ListStepsRequest) -> pb.ListStepsResponse:
        seat = self._seat
        return seat.daemon.list_steps(request, connect_s=CONNECT_S, timeout_s=seat.timeout_s)

    def _note_loaded(self, ready: pb.LoadReady, total_s: float) -> None:
        self.loaded_own = not ready.parts or ready.header_rank == self._seat.rank
        if not self.loaded_own:
            logger.warning(
                "rank %d had no part in step %d of job %s: what is per rank in it is that of rank %d; give this rank "
                "its own seed and its own place in the data",
                self._seat.rank,
                ready.step,
                self._seat.job,
                ready.header_rank,
            )
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
        }
        if ready.provisional:
            logger.warning(
                "step %d of job %s was loaded without the registry: it is complete and checked, but a newer step may "
                "have been committed",
                ready.step,
                self._seat.job,
            )


def _fill(state: object, loaded: Loaded) -> int:
    ready = loaded.ready
    header = loaded.state[ready.header_offset : ready.header_offset + ready.header_bytes]
    data = b"".join(contiguous_bytes(header, max(1, ready.header_bytes)))
    parsed = parse_shared(data, ready) if ready.parts else loaded.parse(data, ready.state_bytes)
    fill(state, parsed, loaded.state, loaded.pour)
    return ready.step
