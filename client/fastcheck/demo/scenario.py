"""The demo's story: four nodes train, one dies with all its memory, training goes on bit for bit.

Nothing is staged: real daemons, real FSDP2 training, SIGKILL, a deleted RAM directory; then the same training
undisturbed and without FastCheck, and every bit compared.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..admin import AdminClient
from ..errors import FastCheckError
from ..local import LocalCluster
from ..local.processes import tail
from . import NODES, TrainSettings
from .display import Display, RunProgress
from .node_watch import NodeWatch
from .ranks import Event, RankGroup
from .report import RunRecord, Timeline, compare, summary

_RAM_BUDGET = "256MiB"
#: Loopback is faster than any network, so `auto` would rightly send raw. The demo is to show the codec at work.
_CLUSTER_SETTINGS = {"codec": "always"}
_UP_TIMEOUT_S = 90.0
#: Importing torch on a busy machine takes a while; a step does not.
_SILENCE_MAX_S = 90.0
_DETECTION_TIMEOUT_S = 30.0
LEADER = "leader"


class DemoError(FastCheckError):
    """The demo could not be played to its end; the message has the ends of the logs."""


class Demo:
    """One showing.

    Args:
        settings: what is trained.
        display: where to show it.
        kill_at: after this step a node is killed.
        victim: node id, or `leader`: whoever leads the registry then.
    """

    def __init__(
        self, settings: TrainSettings, display: Display, *, kill_at: int, victim: str = LEADER
    ) -> None:
        if not 2 <= kill_at < settings.steps:
            raise DemoError(f"a node can be killed after step 2 to {settings.steps - 1}, not {kill_at}")
        self._settings = settings
        self._display = display
        self._kill_at = kill_at
        self._victim = victim
        self.dir = Path(tempfile.mkdtemp(prefix="fastcheck-demo-"))

    def run(self) -> dict[str, Any]:
        """Play it.

        Returns:
            The figures, as `fastcheck demo -o json` prints them. The work folder is removed unless runs differ.

        Raises:
            DemoError: something broke. The work folder, with the logs, stays.
        """
        try:
            result = self._run()
        except KeyboardInterrupt:
            shutil.rmtree(self.dir, ignore_errors=True)
            raise
        except (FastCheckError, TimeoutError, OSError) as error:
            raise DemoError(f"{error}\n{self._daemon_log_tails()}all logs are in {self.dir}") from error
        if result["differences"]:
            self._display.tell(f"all logs are in {self.dir}", "red")
        else:
            shutil.rmtree(self.dir, ignore_errors=True)
        return result

    def _daemon_log_tails(self) -> str:
        logs = sorted((self.dir / "cluster").glob("node-*/daemon.log"))
        return "".join(f"--- {log}\n{text}\n" for log in logs if (text := tail(log, lines=6)))

    def _run(self) -> dict[str, Any]:
        settings, tell = self._settings, self._display.tell
        before, after, reference = RunRecord(), RunRecord(), RunRecord()
        self._display.view.title = f"FastCheck: {NODES} nodes, FSDP2, a checkpoint after every step"
        tell(f"starting {NODES} nodes; a committed step survives the loss of any one of them")
        with LocalCluster(self.dir / "cluster") as cluster:
            cluster.up(
                NODES, tolerate=1, ram_budget=_RAM_BUDGET, settings=_CLUSTER_SETTINGS, timeout_s=_UP_TIMEOUT_S
            )
            addresses = [cluster.address(node_id) for node_id in cluster.node_ids]
            self._find_leader(addresses[0])
            watched = dict(zip(cluster.node_ids, addresses, strict=True))
            with NodeWatch(watched, self._show_nodes) as watch:
                node_id, timeline = self._train_and_recover(cluster, watch, addresses, before, after)
                tell("every step is trained; the cluster is taken down")
        self._display.view.nodes = []
        restored = after.loaded[0][0]
        tell("the same training again, undisturbed and without FastCheck, to compare every bit")
        with self._group("reference", None, digest_at=restored) as group:
            for rank in range(NODES):
                group.start(rank)
                group.begin(rank)
            self._to_the_end(group, reference, self._progress("reference"))
        comparison = compare(before, after, reference, ranks=NODES, steps=settings.steps)
        return summary(
            before,
            after,
            comparison,
            timeline,
            nodes=NODES,
            ranks=NODES,
            steps=settings.steps,
            killed_node=node_id,
            killed_at_step=self._kill_at,
        )

    def _train_and_recover(
        self,
        cluster: LocalCluster,
        watch: NodeWatch,
        addresses: list[str],
        before: RunRecord,
        after: RunRecord,
    ) -> tuple[str, Timeline]:
        view, tell = self._display.view, self._display.tell
        progress = self._progress("training")
        with self._group("training", addresses) as group:
            for rank in range(NODES):
                group.start(rank)
                group.begin(rank)
            for _ in self._follow(group, before, progress):
                if progress.step >= self._kill_at and before.committed_step:
                    break
            leader = self._find_leader(addresses[0])
            node_id = (leader or cluster.node_ids[0]) if self._victim == LEADER else self._victim
            rank = cluster.node_ids.index(node_id)
            watch.expect_loss([node_id])
            killed_at_s = time.monotonic()
            group.kill(rank)
            killed = cluster.kill(node_id, wipe=True)
            view.lost_node = node_id
            tell(
                f"KILLED {node_id}{' (it led the registry)' if node_id == leader else ''}: its trainer, "
                f"{len(killed)} daemon processes and all its memory are gone",
                "bold red",
            )
            # What a launcher does when a rank dies: the others cannot go on without it.
            group.kill_all()
            self._drain(group, before)
        tell(f"the newest step known to be committed is {before.committed_step}")
        progress = self._progress("resumed")
        with self._group("resumed", addresses) as group:
            survivors = [r for r in range(NODES) if r != rank]
            for survivor in survivors:
                group.start(survivor)
            detected_at_s = watch.wait_down(node_id, _DETECTION_TIMEOUT_S)
            tell(
                f"the registry holds {node_id} to be DOWN, {detected_at_s - killed_at_s:.1f} s after it died",
                "yellow",
            )
            group.start(rank)
            tell(f"starting {node_id} again, with nothing in its memory")
            cluster.start(node_id, timeout_s=_UP_TIMEOUT_S)
            watch.calm()
            view.lost_node = None
            self._find_leader(addresses[rank])
            for each in range(NODES):
                group.begin(each)
            self._to_the_end(group, after, progress)
        return node_id, Timeline(killed_at_s=killed_at_s, detected_at_s=detected_at_s)

    def _find_leader(self, address: str) -> str | None:
        with AdminClient(address, timeout_s=_DETECTION_TIMEOUT_S) as client:
            leader: str | None = client.status()["leader"]
        self._display.view.leader = leader
        return leader

    def _to_the_end(self, group: RankGroup, record: RunRecord, progress: RunProgress) -> None:
        ended = 0
        for event in self._follow(group, record, progress):
            ended += event["event"] == "ended"
            if ended == NODES:
                return

    def _follow(self, group: RankGroup, record: RunRecord, progress: RunProgress) -> Iterator[Event]:
        """Events of a run that should go well, after they were recorded and shown.

        Raises:
            DemoError: a rank ended before it was done, or all fell silent.
        """
        try:
            for event in group.events(_SILENCE_MAX_S):
                record.take(event)
                self._show(event, record, progress)
                if event["event"] == "ended" and (event["code"] != 0 or event["rank"] not in record.final):
                    raise DemoError(f"rank {event['rank']} ended with {event['code']}\n{group.log_tails()}")
                yield event
        except TimeoutError as error:
            raise DemoError(f"{error}\n{group.log_tails()}") from None

    def _drain(self, group: RankGroup, record: RunRecord) -> None:
        """Record the events that the killed ranks had sent."""
        ended = 0
        for event in group.events(_SILENCE_MAX_S):
            record.take(event)
            ended += event["event"] == "ended"
            if ended == NODES:
                return

    def _show(self, event: Event, record: RunRecord, progress: RunProgress) -> None:
        match event["event"]:
            case "ready" if event["rank"] == 0 and len(self._display.view.runs) == 1:
                self._display.tell(
                    f"{NODES} ranks hold a byte-level GPT of {event['params']:,} parameters, cut up by FSDP2"
                )
            case "step" if event["rank"] == 0:
                self._display.step(progress, event["step"], float.fromhex(event["loss"]))
            case "saved" if event["committed"]:
                progress.committed = max(record.committed_step, progress.committed or 0)
                progress.ratio = record.ratio
            case "loaded" if event["step"] is not None:
                self._display.tell(
                    f"rank {event['rank']} has step {event['step']} back, {event['load_s']:.2f} s", "green"
                )
                progress.step = max(progress.step, event["step"])

    def _show_nodes(self, nodes: list[dict[str, Any]]) -> None:
        self._display.view.nodes = nodes

    def _group(self, name: str, addresses: list[str] | None, digest_at: int | None = None) -> RankGroup:
        return RankGroup(self._settings, addresses, NODES, self.dir, name=name, digest_at=digest_at)

    def _progress(self, name: str) -> RunProgress:
        progress = RunProgress(name, self._settings.steps)
        self._display.view.runs.append(progress)
        return progress
