"""Opens sessions without pause, many at a time: `python session_flood.py SOCKET...` with nodes' data sockets.

Each is an entry of the registry's log. Speaks the protocol itself: an SDK for each would leave the voters no core.
"""

from __future__ import annotations

import asyncio
import sys
import uuid

import grpc
import grpc.aio

from fastcheck_proto.v1 import trainer_pb2, trainer_pb2_grpc

AT_ONCE = 8
PAUSE_S = 0.2


async def opener(job: str, trainer: trainer_pb2_grpc.TrainerServiceStub) -> None:
    while True:
        opening = trainer_pb2.OpenSession(job=job, rank=0, world_size=1, client_id=uuid.uuid4().hex)
        stream = trainer.Session(iter([trainer_pb2.TrainerMessage(open=opening)]), timeout=5)
        try:
            await stream.read()
        except (
            grpc.aio.AioRpcError
        ):  # no registry, or no daemon, at this moment: it needs the cores to come back
            await asyncio.sleep(PAUSE_S)
        finally:
            stream.cancel()


async def flood() -> None:
    async with asyncio.TaskGroup() as group:
        for number, socket in enumerate(sys.argv[1:]):
            stub = trainer_pb2_grpc.TrainerServiceStub(grpc.aio.insecure_channel(f"unix:{socket}"))
            for again in range(AT_ONCE):
                group.create_task(opener(f"flood-{number}-{again}", stub))


if __name__ == "__main__":
    asyncio.run(flood())
