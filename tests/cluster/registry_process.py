"""Real registry processes for tests: start, kill -9, start again. Run as a script, it is one voter."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
import signal
import sys
from pathlib import Path

from tests.forks import Fork

from fastcheck.local.ports import find_free_ports
from fastcheckd.config import Config, Voter
from fastcheckd.config_sources import load_config

ROOT = Path(__file__).resolve().parents[2]
_SERVER = "fastcheckd.process.registry"


def free_ports(count: int) -> list[int]:
    """Outside of the range that connections are given theirs from: a voter that is started again finds its own free."""
    return find_free_ports(count)


class RegistryCluster:
    """`count` voters on loopback ports of their own, with their state below `folder`."""

    def __init__(self, folder: Path, count: int = 3, **values: object) -> None:
        self.folder = folder
        ports = free_ports(2 * count)
        key = folder / "raft.key"
        key.write_bytes(secrets.token_bytes(32))
        key.chmod(0o600)
        self.voters = tuple(
            Voter(
                node_id=f"node-{i}",
                registry_address=f"127.0.0.1:{ports[2 * i]}",
                raft_address=f"127.0.0.1:{ports[2 * i + 1]}",
            )
            for i in range(count)
        )
        self.config = Config(
            **{
                "cluster_id": "test",
                "node_id": "node-0",
                "keep_steps": 2,
                "voters": self.voters,
                "raft_key_file": key,
            }
            | values
        )
        self.processes: dict[str, Fork] = {}

    def config_of(self, node_id: str) -> Config:
        return dataclasses.replace(self.config, node_id=node_id, state_dir=self.folder / node_id)

    def log(self, node_id: str) -> str:
        path = self.folder / f"{node_id}.log"
        return path.read_text() if path.exists() else ""

    def start(self, node_id: str) -> None:
        config = self.config_of(node_id)
        values = {
            f.name: str(v) if isinstance(v := getattr(config, f.name), Path) else v
            for f in dataclasses.fields(config)
            if getattr(config, f.name) is not None
        }
        values["voters"] = [dataclasses.asdict(v) for v in config.voters]
        path = self.folder / f"{node_id}.json"
        path.write_text(json.dumps(values))  # JSON is YAML
        with (self.folder / f"{node_id}.log").open("ab") as log:
            self.processes[node_id] = Fork(
                ["-m", "tests.cluster.registry_process", path], stdout=log, stderr=log, preload=[_SERVER]
            )

    def start_all(self) -> None:
        for voter in self.voters:
            self.start(voter.node_id)

    def kill(self, node_id: str, how: signal.Signals = signal.SIGKILL) -> None:
        process = self.processes.pop(node_id)
        process.send_signal(how)
        process.wait(10)

    def stop_all(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait(10)


async def serve(path: str) -> None:
    from fastcheckd.process.registry import RegistryServer  # noqa: PLC0415  the tests need none of it

    server = RegistryServer(load_config(Path(path)))
    await server.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await server.stop()


if __name__ == "__main__":
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    asyncio.run(serve(sys.argv[1]))
