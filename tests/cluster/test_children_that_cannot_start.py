"""A process of a node dies at a moment in which no other can be started: it is started as soon as one can be.

The reasons are the kernel's own: no file descriptor is left (EMFILE), or no process (EAGAIN). While they last, the node
says so in its log, and to those who ask whether it is ready and whether the cluster is well. Nothing is executed when a
process is started, so it does not matter whether there is anything to execute.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.cluster.harness import Job, process_of, until
from tests.cluster.observed import get

from fastcheck.admin import AdminClient
from fastcheck.local import LocalCluster

NODE, OTHER = "node-1", "node-0"
PIDS = Path("/sys/fs/cgroup/pids")


@pytest.fixture(scope="module")
def bin_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A `bin` whose `python` is this interpreter, until somebody takes it away, as an upgrade does."""
    alias = tmp_path_factory.mktemp("python")
    (alias / "bin").mkdir()
    (alias / "bin" / "python").symlink_to(sys.executable)
    for name in ("lib", "lib64", "pyvenv.cfg"):
        if (found := Path(sys.prefix) / name).exists():
            (alias / name).symlink_to(found)
    yield alias / "bin"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, bin_folder: Path) -> Iterator[LocalCluster]:
    with (
        pytest.MonkeyPatch.context() as patch,
        LocalCluster(tmp_path_factory.mktemp("children") / "cluster") as made,
    ):
        patch.setattr(sys, "executable", str(bin_folder / "python"))  # what the daemons are started with
        made.up(3, ram_budget="256MiB")
        patch.undo()
        yield made


@contextlib.contextmanager
def no_descriptors(parent: psutil.Process, _bin: Path) -> Iterator[None]:
    """Each call that makes a file descriptor fails in the parent."""
    before = parent.rlimit(resource.RLIMIT_NOFILE)
    parent.rlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        parent.rlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def no_processes(parent: psutil.Process, _bin: Path) -> Iterator[None]:
    """Each fork fails in the parent: a control group that has had its share."""
    group = PIDS / f"fastcheck-{parent.pid}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group for pids can be made: {error}")
    try:
        for task in Path(f"/proc/{parent.pid}/task").iterdir():
            (group / "tasks").write_text(task.name)
        (group / "pids.max").write_text("1")
        yield
    finally:
        (group / "pids.max").write_text("max")
        for task in (group / "tasks").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (PIDS / "tasks").write_text(task)
        # What the parent has started meanwhile is gone from it a moment later.
        until(
            lambda: not (group / "tasks").read_text() and not group.rmdir(), "the control group to be empty"
        )


@contextlib.contextmanager
def nothing_to_execute(_parent: psutil.Process, bin_folder: Path) -> Iterator[None]:
    """The interpreter is not where it was."""
    shutil.move(bin_folder / "python", bin_folder / "away")
    try:
        yield
    finally:
        shutil.move(bin_folder / "away", bin_folder / "python")


def failing(cluster: LocalCluster) -> str:
    """What another node's `status` says about processes that do not run."""
    with AdminClient(cluster.address(OTHER), timeout_s=5) as admin:
        return "\n".join(c["detail"] for c in admin.status()["codes"] if c["code"] == "PROCESS_FAILING")


def parent_of(cluster: LocalCluster) -> psutil.Process:
    return psutil.Process(cluster.pids(NODE)[0])


def another_runs(cluster: LocalCluster, kind: str, than: psutil.Process) -> bool:
    with contextlib.suppress(AssertionError):
        return process_of(cluster, NODE, kind).pid != than.pid
    return False


@pytest.mark.parametrize(
    ("fault", "kind", "reason"),
    [
        (no_descriptors, "registry", "Too many open files"),
        (no_processes, "registry", "Resource temporarily unavailable"),
        (no_processes, "data", "Resource temporarily unavailable"),
    ],
)
def test_a_process_that_dies_when_none_can_be_started_is_started_later(
    cluster, bin_folder, fault, kind, reason
):
    job = Job(cluster, [NODE], name=f"{fault.__name__}-{kind}")
    job.commit(1)
    parent, victim = parent_of(cluster), process_of(cluster, NODE, kind)
    log = cluster.log_file(NODE)
    told_before = log.stat().st_size

    cannot = f"the {kind} process cannot be started"

    def told() -> list[str]:
        with log.open() as lines:
            lines.seek(told_before)
            return [line for line in lines if cannot in line]

    with fault(parent, bin_folder):
        victim.kill()
        until(lambda: not psutil.pid_exists(victim.pid), f"the end of the {kind} process")
        with contextlib.suppress(pytest.fail.Exception):
            until(told, "a line in the log", timeout_s=5)
        said = told()
        with contextlib.suppress(pytest.fail.Exception):
            until(lambda: cannot in failing(cluster), "a health code", timeout_s=5)
        shown = failing(cluster)
        status, body = get(cluster, NODE, "/readyz")

    # The longest pause is 5 s.
    until(lambda: another_runs(cluster, kind, victim), f"another {kind} process", timeout_s=20)
    cluster.wait_up([NODE], timeout_s=60)
    until(lambda: job.commit(2) is None, "a commit")
    job.stop()

    assert len(said) == 1 and reason in said[0], said  # once, however often it was tried
    assert cannot in shown and reason in shown and NODE in shown
    assert status == 503
    assert any(cannot in why for why in json.loads(body)["reasons"]), body
    until(lambda: cannot not in failing(cluster), "the code to go")
    until(lambda: cannot not in get(cluster, NODE, "/readyz")[1], "the reason to go")
    until(
        lambda: any(re.search(r"over after .* s", line) for line in told()), "the log to say that it is over"
    )
    assert parent_of(cluster).pid == parent.pid
    assert len([p for p in parent.children() if p.name() == f"fcheck-{kind}"]) == 1


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (nothing_to_execute, "agent"),
        (nothing_to_execute, "data"),
        (nothing_to_execute, "registry"),
        (no_descriptors, "data"),
    ],
)
def test_a_process_that_needs_nothing_to_start_is_started_at_once(cluster, bin_folder, fault, kind):
    job = Job(cluster, [NODE], name=f"{fault.__name__}-{kind}")
    job.commit(1)
    victim = process_of(cluster, NODE, kind)
    with fault(parent_of(cluster), bin_folder):
        victim.kill()
        until(lambda: another_runs(cluster, kind, victim), f"another {kind} process", timeout_s=20)
        until(lambda: job.commit(2) is None, "a commit")
    job.stop()
