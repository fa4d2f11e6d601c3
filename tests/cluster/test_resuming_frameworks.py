"""Runs of Hugging Face's Trainer and Lightning that are killed or stopped at every kind of place and go on bit for bit.

In each run an epoch is six steps. A chain of runs goes through several places, since each resume may lose what the next
one needs: the first step, the middle and the last step of an epoch, a validation; killed, and stopped in good order.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.cluster import hf_rank, lightning_rank
from tests.cluster.resuming import RUN_S, End, Runs

from fastcheck.local import LocalCluster

pytestmark = pytest.mark.timeout(6 * RUN_S)

FIRST, MIDDLE, LAST = End("killed", 1), End("killed", 9), End("killed", 6)
VALIDATING = End("validating", 12)
STOPPED_LAST, STOPPED_MIDDLE = End("stopped", 6), End("stopped", 9)
#: Ways through all of these.
KILLED = [FIRST, LAST, MIDDLE, VALIDATING]
STOPPED = [STOPPED_LAST, STOPPED_MIDDLE, End("killed", 12), End("stopped", 15)]
EPOCHS, STEPS = {"max_epochs": 3}, {"max_steps": 18, "max_epochs": -1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("resuming")
    with LocalCluster(folder / "cluster") as cluster:
        cluster.up(2, tolerate=1, ram_budget="256MiB")
        yield Runs(cluster, folder, ["tests.cluster.hf_rank", "tests.cluster.lightning_rank"])


@pytest.mark.parametrize(
    ("ends", "world_size"),
    [
        pytest.param(KILLED, 1, id="killed-1"),
        pytest.param(STOPPED, 2, id="stopped-2"),
        pytest.param(KILLED, 2, marks=pytest.mark.long, id="killed-2"),
        pytest.param(STOPPED, 1, marks=pytest.mark.long, id="stopped-1"),
    ],
)
def test_a_hugging_face_trainer_goes_on(runs, world_size, ends):
    job = f"hf-{world_size}-{ends[0].how}"
    runs.go_on_as_if_nothing_had_happened(hf_rank.train, job, world_size, ends)


@pytest.mark.parametrize(
    ("world_size", "ends", "validates", "limit"),
    [
        pytest.param(1, KILLED, 2, EPOCHS, id="validating-killed-1"),
        pytest.param(2, STOPPED, 0, STEPS, id="not-stopped-2"),
        pytest.param(1, KILLED, 0, STEPS, marks=pytest.mark.long, id="not-killed-1"),
        pytest.param(2, KILLED, 2, EPOCHS, marks=pytest.mark.long, id="validating-killed-2"),
        pytest.param(2, KILLED, 0, STEPS, marks=pytest.mark.long, id="not-killed-2"),
        pytest.param(1, STOPPED, 2, EPOCHS, marks=pytest.mark.long, id="validating-stopped-1"),
        pytest.param(1, STOPPED, 0, STEPS, marks=pytest.mark.long, id="not-stopped-1"),
        pytest.param(2, STOPPED, 2, EPOCHS, marks=pytest.mark.long, id="validating-stopped-2"),
    ],
)
def test_a_lightning_fit_goes_on_with_a_loader_that_knows_its_place(runs, world_size, ends, validates, limit):
    if not validates:
        ends = [end for end in ends if end.how != "validating"]
    job = f"pl-{world_size}-{ends[0].how}-{validates}"
    runs.go_on_as_if_nothing_had_happened(
        lightning_rank.train, job, world_size, ends, stateful=True, validates=validates, limit=limit
    )


@pytest.mark.parametrize(
    ("validates", "limit"),
    [
        pytest.param(1, EPOCHS, id="validating"),
        pytest.param(0, STEPS, marks=pytest.mark.long, id="not"),
    ],
)
def test_a_lightning_fit_with_a_plain_loader_goes_on_after_an_epoch(runs, validates, limit):
    runs.go_on_as_if_nothing_had_happened(
        lightning_rank.train,
        f"pl-plain-{validates}",
        1,
        [LAST, End("stopped", 12)],
        stateful=False,
        validates=validates,
        limit=limit,
    )


@pytest.mark.parametrize(
    ("disk", "stateful", "validates", "limit"),
    [({"every_n_epochs": 1}, False, 1, EPOCHS), ({"every_n_train_steps": 6}, True, 0, STEPS)],
    ids=["epochs", "steps"],
)
def test_a_lightning_fit_goes_on_after_an_epoch_from_its_own_file(runs, disk, stateful, validates, limit):
    runs.go_on_as_if_nothing_had_happened(
        lightning_rank.train,
        f"pl-disk-{validates}",
        1,
        [LAST, End("killed", 12)],
        disk=disk,
        stateful=stateful,
        validates=validates,
        limit=limit,
    )
