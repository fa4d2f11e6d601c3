"""`fastcheck status`, `jobs` and the daemon's log while saves do not do what their trainers believe.

A trainer that does not look at its handles hears nothing of saves that are refused, wait or are never committed: the
surfaces that an operator looks at have to say so, with the reason, and stop saying so when it is over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from tests.cluster.harness import Job, make_state, run_module, until

from fastcheck import Checkpointer, FastCheckError, OutOfMemoryError, SaveHandle
from fastcheck.local import LocalCluster

ASK = "node-2"
BUDGET = 128 << 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("status") / "cluster") as made:
        made.up(3, ram_budget=BUDGET, settings={"codec": "never"})
        yield made


def cli(cluster: LocalCluster, *words: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of a command."""
    done = run_module("fastcheck", *words, "-o", "json", "--address", cluster.address(ASK))
    return done.returncode, json.loads(done.stdout)


def code(cluster: LocalCluster, name: str) -> dict[str, str] | None:
    """A health code, if `status` shows it; then the command's exit code is not that of a healthy cluster."""
    exit_code, status = cli(cluster, "status")
    found = next((c for c in status["codes"] if c["code"] == name), None)
    assert found is None or (exit_code == 5 and status["health"] == "DEGRADED"), status
    return found


class Log:
    """What a node's daemon writes from now on."""

    def __init__(self, cluster: LocalCluster, node: str) -> None:
        self._path = cluster.log_file(node)
        self._from = self._path.stat().st_size

    def lines(self, *parts: str) -> list[str]:
        with self._path.open() as log:
            log.seek(self._from)
            return [line for line in log if all(part in line for part in parts)]


def job_of(cluster: LocalCluster, name: str) -> dict[str, Any]:
    _, listed = cli(cluster, "jobs")
    found: dict[str, Any] = next(j for j in listed["jobs"] if j["job"] == name)
    return found


def test_a_rank_that_never_saves_is_named_with_the_last_commit(cluster):
    log = Log(cluster, "node-0")
    job = Job(cluster, ["node-0", "node-1"], "halted")
    steps = iter(range(3, 1000))
    newest = next(steps)
    job.commit(newest)
    assert 0 <= job_of(cluster, "halted")["last_commit_age_s"] < 60
    saver = job.ranks[0]
    for _ in range(3):  # in a row, so that the third finds two under way that have just begun to wait
        saver.save(next(steps), job.state(1, 0))

    def told() -> dict[str, str] | None:
        saver.save(next(steps), job.state(1, 0))  # the trainer of rank 0 goes on, that of rank 1 hangs
        return code(cluster, "JOB_NOT_COMMITTING")

    found = until(told, "the code")
    assert "job halted" in found["detail"] and f"its last commit is step {newest}" in found["detail"], found
    assert "late: rank 1 (node-1)" in found["detail"], found
    row = job_of(cluster, "halted")
    assert row["newest_step"] == newest and row["last_commit_age_s"] > 5
    _, top = cli(cluster, "top", "--count", "1")
    assert next(j for j in top["jobs"] if j["job"] == "halted")["last_commit_age_s"] > 5
    assert log.lines("save of rank 0 of job halted waits: step"), "a save that is held up"

    def both_save() -> bool:
        return all_committed(job.save(next(steps)))

    until(both_save, "a commit")
    until(lambda: code(cluster, "JOB_NOT_COMMITTING") is None, "the code to go")
    assert job_of(cluster, "halted")["last_commit_age_s"] < 60
    until(lambda: both_save() and log.lines("rank 0 of job halted waits: over after"), "the log to say so")
    assert len(log.lines("rank 0 of job halted waits")) < 10, "bounded"
    job.stop()


def all_committed(handles: list[SaveHandle]) -> bool:
    errors = [handle.exception(timeout=20) for handle in handles]
    return not any(errors) and all(handle.committed for handle in handles)


def refused(ckpt: Checkpointer, step: int, state: dict[str, Any]) -> FastCheckError:
    error = ckpt.save(step, state).exception(timeout=60)
    assert error is not None
    return error


def test_a_job_that_is_refused_for_a_finished_ones_bytes_names_that_and_what_to_do(cluster):
    finished = Job(cluster, ["node-0"], "finished", megabytes=50)
    finished.commit(1)
    finished.stop()
    log = Log(cluster, "node-0")
    waiting = Job(cluster, ["node-0"], "waiting", megabytes=45)  # and so much again for the next step
    ckpt = waiting.ranks[0]
    for step in range(1, 13):
        assert isinstance(refused(ckpt, step, waiting.state(step, 0)), OutOfMemoryError)
    found = until(lambda: code(cluster, "SAVES_FAILING"), "the code")
    for part in ("job waiting", "node-0", "12", "job finished"):
        assert part in found["detail"], found
    assert "fastcheck delete finished --all" in found["do"]
    lines = log.lines("rank 0 of job waiting", "refused")
    assert 1 <= len(lines) <= 3 and "step 1" in lines[0] and "ram_budget_bytes" in lines[0], lines

    done = run_module("fastcheck", "delete", "finished", "--all", "--yes", "--address", cluster.address(ASK))
    assert done.returncode == 0, done.stderr
    until(lambda: ckpt.save(20, waiting.state(20, 0)).exception(timeout=60) is None, "room for the job")
    until(lambda: code(cluster, "SAVES_FAILING") is None, "the code to go")
    assert any(re.search(r"over after .* \(12 times\)", line) for line in log.lines("rank 0 of job waiting"))
    waiting.stop()


def test_a_step_that_is_merely_late_is_no_alarm(cluster):
    job = Job(cluster, ["node-0", "node-1"], "steady")
    for step in range(1, 6):
        job.commit(step)
        assert code(cluster, "JOB_NOT_COMMITTING") is None and code(cluster, "SAVES_FAILING") is None
    job.ranks[0].save(6, make_state(1, 6, 0))  # the last step of a trainer that was killed
    job.stop()
    assert code(cluster, "JOB_NOT_COMMITTING") is None
