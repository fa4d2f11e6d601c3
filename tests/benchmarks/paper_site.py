"""Where the paper's experiment takes place: one namespace per node, two clusters on the same links, ranks, a server.

Both clusters have a daemon in every node's namespace and live through the whole experiment, so that their rounds can
take turns. Their heartbeats are ten times slower than usual, since sixteen idle daemons would otherwise take the cores
that the experiment needs; finding a dead node is not part of any figure. Nor is making lost copies anew, which is held
to the lowest rate: the watched node's memory is wiped on purpose, again and again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.netlab.lab import Lab
from tests.netlab.wires import ROOT, Network, lives

from .paper_goals import COPY, HOLDERS, OURS
from .paper_storage import Storage

STORAGE = "storage"
#: Of the second cluster.
COPY_PORTS = {"agent_port": 7550, "data_port": 7551, "lane_port": 7552, "metrics_address": ""}
COPY_VOTER_PORTS = (7553, 7554)
CALM = {
    "heartbeat_interval_s": 1.0,
    "suspect_after_s": 4.0,
    "down_after_s": 8.0,
    "lease_s": 6.0,
    "repair_bytes_per_s": 1 << 20,
    "transfer_timeout_s": 60.0,
}
COMMAND_TIMEOUT_S = 900.0
MASTER_PORT = 7600
_SHM = Path("/dev/shm")
_PREFIX = "fastcheck-paper"


class Site:
    """Everything that runs, and the links. A context manager: whatever happens, all of it is gone afterwards.

    Args:
        nodes: the last one is watched: its rank is saved and recovered. The first three are the voters.
        states: folder of the trained models.
        codec: of our own cluster.
        server_python: interpreter of the virtual environment with the storage server; None: there is none.
    """

    def __init__(
        self, nodes: int, states: Path, codec: str, ram_budget: str, server_python: Path | None
    ) -> None:
        self.nodes = [f"node-{i}" for i in range(nodes)]
        self.watched = self.nodes[-1]
        self.network = Network([*self.nodes, STORAGE])
        self.storage: Storage | None = None
        self.clusters: dict[str, Lab] = {}
        self._states, self._codec, self._ram_budget = states, codec, ram_budget
        self._server_python = server_python
        self._ranks: list[RankProcess] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Site:
        _remove_leftovers()
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastcheck-paper-")))
            stack.enter_context(self.network)
            if self._server_python is not None:
                files = _SHM / f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(3)}"
                storage = Storage(self.network, STORAGE, self._server_python, files)
                self.storage = stack.enter_context(storage)
            others = len(self.nodes) - 1
            ours: dict[str, Any] = {"codec": self._codec, "spread": others}
            copy: dict[str, Any] = {"codec": "never", "spread": 1, **COPY_PORTS}
            for name, settings in ((OURS, ours), (COPY, copy)):
                own = folder / name.replace(" ", "-")
                own.mkdir()
                ports = {"voter_ports": COPY_VOTER_PORTS} if name == COPY else {}
                lab = Lab(
                    own, len(self.nodes), network=self.network, tolerate=1,
                    ram_budget_bytes=self._ram_budget, **CALM, **settings, **ports,
                )  # fmt: skip
                self.clusters[name] = stack.enter_context(lab)
            for number, node in enumerate(self.nodes):
                rank = RankProcess(self.network, node, number, self._states)
                self._ranks.append(rank)
                stack.callback(rank.end)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    @property
    def master(self) -> str:
        """Where the ranks of torch.distributed meet."""
        return f"{self.network.address(self.nodes[0])}:{MASTER_PORT}"

    def shape(self, gbit_per_s: float, links: str) -> None:
        """Give every node, and the server, a link of that rate in both directions; the watched node's may be faster."""
        self.network.heal()
        for name in self.network.names:
            faster = len(self.nodes) if links == HOLDERS and name == self.watched else 1
            self.network.shape_both(name, gbit_per_s * 1000 * faster)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Tell the watched node's rank to do something; its answer."""
        return self._ranks[-1].ask(do, arguments)

    def ask_all(self, do: str, by_rank: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Tell all ranks at once; their answers in order."""
        answers: list[dict[str, Any] | Exception] = [{} for _ in self._ranks]

        def one(index: int) -> None:
            try:
                answers[index] = self._ranks[index].ask(do, by_rank[index])
            except Exception as error:  # noqa: BLE001  raised below, in the asking thread
                answers[index] = error

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(self._ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        good = []
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
            good.append(answer)
        return good

    def empty_watched(self, cluster: str) -> None:
        """The watched node is lost with all its memory, and comes back empty."""
        lab = self.clusters[cluster]
        lab.kill(self.watched, wipe=True)
        lab.start(self.watched)


class RankProcess:
    """The asking side of `paper_rank`."""

    def __init__(self, network: Network, node: str, number: int, states: Path) -> None:
        self._name = f"rank {number} on {node}"
        paths = os.pathsep.join(str(Path(p).absolute()) for p in sys.path if p)
        command = [sys.executable, "-m", "tests.benchmarks.paper_rank", str(number), str(states.absolute())]
        self._process = subprocess.Popen(
            network.command(node, *command),
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "eth0"},
        )  # fmt: skip

    def ask(self, do: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Tell it to do something; its answer.

        Raises:
            RuntimeError: it failed, ended, or took too long; with what it said.
        """
        commands, answers = self._process.stdin, self._process.stdout
        assert commands is not None and answers is not None
        commands.write(json.dumps({"do": do, **arguments}) + "\n")
        commands.flush()
        if not select.select([answers], [], [], COMMAND_TIMEOUT_S)[0]:
            raise RuntimeError(f"{self._name} did not answer to '{do}' in {COMMAND_TIMEOUT_S:g} s")
        line = answers.readline()
        if not line:
            raise RuntimeError(f"{self._name} ended at '{do}', see above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self._name} failed at '{do}': {answer['error']}")
        return answer

    def end(self) -> None:
        """End the process. Repeatable."""
        self._process.kill()
        self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _remove_leftovers() -> None:
    """What killed runs have left in memory; namespaces and clusters look after themselves."""
    for left in [*_SHM.glob(f"{_PREFIX}-*"), *Path(tempfile.gettempdir()).glob("fastcheck-paper-*")]:
        made = re.fullmatch(rf"{_PREFIX}-(\d+)-\w+(?:\.log)?", left.name)
        if made and not lives(int(made[1])):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
