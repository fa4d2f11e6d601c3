"""The codec on a real cluster: steps of real training travel small, whatever dies, and come back bit for bit."""

import pytest
import torch
from tests.cluster.harness import DEADLINE_S, counters, node_states, process_of, until
from torch import nn

from fastcheck import Checkpointer, LossyCheckpointError
from fastcheck.admin import AdminClient

#: Steps must be this much smaller than the state; what real training gives is in docs/benchmarks.md.
RATIO_MIN = 2


class Training:
    """A small model, AdamW with a schedule, and noise to fit."""

    def __init__(self, seed=1):
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 64)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100)
        self.data = torch.Generator().manual_seed(seed)
        self.state = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def step(self):
        x = torch.randn(32, 256, generator=self.data)
        loss = (self.model(x) - torch.sin(x[:, :64])).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()

    def tensors(self):
        found = {f"model.{name}": tensor.clone() for name, tensor in self.model.state_dict().items()}
        for index, moments in self.optimizer.state_dict()["state"].items():
            found |= {f"{index}.{name}": value.clone() for name, value in moments.items()}
        return found

    def bits(self):
        return {
            name: tensor.contiguous().view(torch.uint8)
            for name, tensor in self.tensors().items()
            if tensor.dim()
        }


def assert_bits(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def checkpointer(cluster):
    return Checkpointer("gpt", rank=0, world_size=1, address=cluster.address("node-0"))


def save(ckpt, training, step):
    training.step()
    return ckpt.save(step, training.state).result(timeout=DEADLINE_S).stats


def load(cluster, step):
    fresh = Training(seed=2)
    with checkpointer(cluster) as ckpt:
        assert ckpt.load(fresh.state) == step
    return fresh.bits()


def test_steps_travel_small_through_the_loss_of_a_holder_and_of_the_owners_process(make_cluster):
    cluster = make_cluster(3, codec="always")
    training = Training()
    with checkpointer(cluster) as ckpt:
        first = save(ckpt, training, 1)
        for step in (2, 3):
            stats = save(ckpt, training, step)
            assert stats["ratio"] > RATIO_MIN, stats
            assert {"adam", "delta"} & stats["codecs"].keys() and stats["encode_s"] > 0 and not stats["lossy"]
            # Zeros between runs go by no codec.
            assert 0.999 < sum(use["raw_bytes"] for use in stats["codecs"].values()) / stats["bytes"] <= 1
            assert stats["ratio"] > first["ratio"]
        assert sum(counters(cluster, node)["deltas_made"] for node in ("node-1", "node-2")) >= 2

        cluster.kill("node-2", wipe=True)
        until(lambda: node_states(cluster, "node-0")["node-2"] == "DOWN", "node-2 to be DOWN")
        rebased = save(ckpt, training, 4)
        stats = save(ckpt, training, 5)
        # Whoever took the lost copy's place had no base, unless a repair was faster than the save.
        assert rebased["ratio"] < RATIO_MIN or counters(cluster, "node-1")["replicas_repaired"]
        assert stats["ratio"] > RATIO_MIN
        assert_bits(load(cluster, 5), training.bits())

    owner = process_of(cluster, "node-0", "data")
    owner.kill()
    owner.wait(DEADLINE_S)

    def is_back():
        # UP alone may be a view of before.
        adopted = counters(cluster, "node-0").get("manifests_adopted")
        return adopted and node_states(cluster, "node-1")["node-0"] == "UP"

    until(is_back, "node-0 to be UP with what it held")
    with checkpointer(cluster) as ckpt:
        assert ckpt.load(training.state) == 5
        stats = save(ckpt, training, 6)
        assert stats["ratio"] > RATIO_MIN  # against step 5, which the new process found in memory
    cluster.kill("node-0", wipe=True)
    cluster.start("node-0")
    assert_bits(load(cluster, 6), training.bits())
    told = counters(cluster, "node-1")
    assert not [name for name in told if name.startswith("corrupt_") and told[name]]


def test_an_operator_sees_what_the_codec_did(make_cluster):
    cluster = make_cluster(2, codec="always")
    training = Training()
    with checkpointer(cluster) as ckpt:
        for step in (1, 2):
            save(ckpt, training, step)
    with AdminClient(cluster.address("node-1"), timeout_s=5) as admin:
        older, newer = admin.replicas("gpt")["replicas"]
        inspected = admin.inspect("gpt", 2)
        assert [c["lossy"] for c in admin.checkpoints("gpt")["checkpoints"]] == [False, False]
    # The owner has both steps as they are, the holder the newer one and reverse deltas. Slots are whole pages.
    assert 2 * newer["bytes"] <= newer["stored_bytes"] < 2.01 * newer["bytes"]
    assert newer["stored_bytes"] > older["stored_bytes"] > older["bytes"]
    assert inspected["ranks"][0]["codecs"] == newer["codecs"] and "adam" in newer["codecs"]
    owner = counters(cluster, "node-0")
    assert owner["chunks_encoded"] > 0 and owner["encode_cpu_ms"] > 0 and owner["bytes_saved"] > 0
    assert owner["chunks_resent"] == 0


def test_never_sends_everything_as_it_is(make_cluster):
    cluster = make_cluster(2, codec="never")
    training = Training()
    with checkpointer(cluster) as ckpt:
        for step in (1, 2):
            stats = save(ckpt, training, step)
            assert stats["codecs"].keys() == {"raw"} and stats["encoded_bytes"] == stats["bytes"]
    assert counters(cluster, "node-1")["deltas_made"] == counters(cluster, "node-0")["bytes_saved"] == 0


def test_a_lossy_step_is_the_same_everywhere_says_so_and_is_not_loaded_by_mistake(make_cluster):
    cluster = make_cluster(3, codec="always")
    training = Training()
    address = cluster.address("node-0")
    with Checkpointer("gpt", rank=0, world_size=1, address=address, precision="compact") as ckpt:
        for step in (1, 2, 3):
            stats = save(ckpt, training, step)
            assert stats["lossy"]
        assert stats["ratio"] > 2 * RATIO_MIN and {"index4", "bounded"} <= stats["codecs"].keys()
        near = Training(seed=2)
        assert ckpt.load(near.state) == 3  # whoever saves lossy may load lossy
    for name, exact in training.tensors().items():
        error = (near.tensors()[name] - exact).abs().max()
        # docs/formats.md, "Lossy": second moments to 2 bits, first ones to half a step of 1/8 of their group's largest.
        bound = {"exp_avg_sq": 1 / 8, "exp_avg": 1 / 16}.get(name.rpartition(".")[2], 1 / 100)
        assert error <= bound * exact.abs().max(), name
    with AdminClient(cluster.address("node-1"), timeout_s=5) as admin:
        assert all(c["lossy"] for c in admin.checkpoints("gpt")["checkpoints"])

    cluster.kill("node-0", wipe=True)  # the next reader gets the holders' bytes: the very same
    cluster.start("node-0")
    fresh = Training(seed=3)
    untouched = fresh.bits()
    with checkpointer(cluster) as exact_only:
        with pytest.raises(LossyCheckpointError):
            exact_only.load(fresh.state)
        assert_bits(fresh.bits(), untouched)
        assert exact_only.load(fresh.state, allow_lossy=True) == 3
    assert_bits(fresh.bits(), near.bits())
