"""Before a node stops for good: have its copies made elsewhere, as far as the time given allows.

Off unless `drain_on_stop_s` is set. Most stops are restarts, after which the node adopts what its RAM still holds; to
copy all of it away each time would cost the network more than the restart costs safety.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from fastcheck_proto.v1 import registry_pb2 as rpb

from ..config import Config
from ..errors import FastCheckdError
from ..registry.client import RegistryClient
from .runtime import stop_signal
from .systemd import RelayedNotifier, one_line

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 1.5
LOOK_INTERVAL_S = 1.0
#: To systemd, while a drain goes on: wait so much longer.
EXTENSION_USEC = str(30 * 10**6)


async def drain(
    node_id: str,
    registry: RegistryClient,
    *,
    within_s: float,
    going_on: Callable[[str], None] = lambda _: None,
) -> bool:
    """Drain this node until it may be stopped without loss or the time is over; whether it may.

    A registry that does not answer is asked again until then.

    Args:
        going_on: is told, at every look, why it may not be stopped yet.
    """
    why = "the registry has not answered"
    draining = False
    try:
        async with asyncio.timeout(within_s):
            while True:
                try:
                    if not draining:
                        asked = rpb.SetDrainingRequest(node_id=node_id, draining=True)
                        await registry.set_draining(asked, CALL_TIMEOUT_S)
                        draining = True
                    verdict = await registry.safe_to_stop(
                        rpb.SafeToStopRequest(node_id=node_id), CALL_TIMEOUT_S
                    )
                except FastCheckdError as error:
                    why = str(error)
                else:
                    if verdict.safe:
                        logger.info("drained: nothing depends on this node any more")
                        return True
                    why = "; ".join(verdict.reasons) or "copies are still being made"
                going_on(why)
                await asyncio.sleep(LOOK_INTERVAL_S)
    except TimeoutError:
        logger.warning("stopping undrained after %g s: %s", within_s, why)
        return False


async def drain_until_told(config: Config, registry: RegistryClient, notifier: RelayedNotifier) -> None:
    """As long as it may take, or until whoever stops this node says so once more."""
    at_once = stop_signal()
    draining = asyncio.create_task(
        drain(
            config.node_id,
            registry,
            within_s=config.drain_on_stop_s,
            # Each asks for so much more time than the unit allows for.
            going_on=lambda why: notifier.tell(
                STOPPING="1", STATUS=one_line(f"draining: {why}"), EXTEND_TIMEOUT_USEC=EXTENSION_USEC
            ),
        )
    )
    ends: set[asyncio.Future[Any]] = {draining, at_once}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    draining.cancel()
    await asyncio.gather(draining, return_exceptions=True)
