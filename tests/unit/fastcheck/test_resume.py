"""What a resume needs beside model and optimizer: what is drawn and what is read goes on as if nothing had been."""

import math
import random
import sys

import numpy as np
import pytest
import torch
from tests.unit.fastcheck.state_bytes import snapshot
from torch.optim import lr_scheduler
from torchdata.stateful_dataloader import StatefulDataLoader

import fastcheck
from fastcheck import resume


def through_a_save(state, into):
    """What a save and a load make of it, without a daemon."""
    snapshot(state).fill(into)


def draw():
    """Some numbers from every generator; gauss keeps a second one back."""
    return (
        [random.random(), random.gauss(0, 1), random.randint(0, 10**30)],
        np.random.standard_normal(3).tolist(),
        torch.rand(3).tolist(),
        torch.randperm(7).tolist(),
    )


def test_all_generators_go_on_as_if_nothing_had_been():
    own = torch.Generator().manual_seed(3)
    random.gauss(0, 1), np.random.standard_normal(1), torch.randn(1)  # each keeps half a pair
    saved = resume.run_state(generators={"loader": own})
    kept = snapshot(saved)
    uninterrupted = draw(), torch.rand(3, generator=own).tolist()
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    again = torch.Generator()
    kept.fill(resume.run_state(generators={"loader": again}))
    assert (draw(), torch.rand(3, generator=again).tolist()) == uninterrupted


def test_generators_that_are_not_those_that_were_saved_are_named():
    saved = resume.Generators({"loader": torch.Generator()}).state_dict()
    with pytest.raises(ValueError, match=r"\['loader'\] were saved, \['dropout'\] are here"):
        resume.Generators({"dropout": torch.Generator()}).load_state_dict(saved)


def test_numpy_is_only_looked_at_where_it_is_used(monkeypatch):
    assert "numpy" in resume.Generators().state_dict()
    monkeypatch.delitem(sys.modules, "numpy.random")
    without = resume.Generators().state_dict()
    assert "numpy" not in without
    monkeypatch.undo()
    before = np.random.get_state(legacy=False)["state"]["key"].copy()
    resume.Generators().load_state_dict(without)
    assert (np.random.get_state(legacy=False)["state"]["key"] == before).all()


def test_states_of_devices_that_are_not_here_are_told(caplog):
    saved = resume.Generators().state_dict()
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    saved["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * (here + 2)
    resume.Generators().load_state_dict(saved)
    assert f"{here + 2} CUDA devices and {here} are here" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_cuda_generators_of_all_devices_go_on():
    torch.rand(1, device="cuda")
    saved = resume.Generators().state_dict()
    expected = [torch.rand(3, device=f"cuda:{d}").tolist() for d in range(torch.cuda.device_count())]
    torch.cuda.manual_seed_all(99)
    resume.Generators().load_state_dict(saved)
    assert [torch.rand(3, device=f"cuda:{d}").tolist() for d in range(torch.cuda.device_count())] == expected


SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 3),
    "multi": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "cosine": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=40),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_torch_go_on(name):
    def job():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.5)
        return {"optimizer": optimizer, **resume.run_state(scheduler=SCHEDULERS[name](optimizer))}

    def train(state, steps):
        found = []
        for step in range(steps):
            state["optimizer"].step()
            if name == "plateau":
                state["scheduler"].step(1.0 + step % 2)
            else:
                state["scheduler"].step()
            found.append(state["optimizer"].param_groups[0]["lr"])
        return found

    one = job()
    train(one, 3)
    other = job()
    through_a_save(one, other)
    assert train(other, 8) == train(one, 8)


def test_a_gradient_scaler_goes_on_with_its_scale():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2048.0
    other = torch.amp.GradScaler("cpu")
    through_a_save(resume.run_state(scaler=scaler), resume.run_state(scaler=other))
    assert other.state_dict() == scaler.state_dict()


def test_what_has_no_position_is_refused_with_what_to_use_instead():
    with pytest.raises(fastcheck.UnsupportedStateError, match="StatefulDataLoader"):
        resume.run_state(loader=torch.utils.data.DataLoader([1, 2]))
    with pytest.raises(fastcheck.UnsupportedStateError, match=r"scheduler\['b'\] is a float"):
        resume.run_state(scheduler={"b": math.pi})


class Noisy(torch.utils.data.Dataset):
    """Items that are drawn from torch's generator: as dropout would, it notices if a number too many was drawn."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index, torch.rand(()).item()


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("at", [3, 9])
def test_a_stateful_data_loader_goes_on_wherever_it_was(workers, own_generator, at):
    """In the middle of an epoch, at its end, in the next one. What workers draw themselves begins anew."""

    def job():
        own = torch.Generator().manual_seed(5) if own_generator else None
        loader = StatefulDataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=workers, generator=own)
        return loader, resume.run_state(loader=loader, generators={"own": own} if own else None)

    def train(loader, batches):
        """As a loop over epochs does, however long the first one still is."""
        found = []
        while True:
            for indices, noise in loader:
                found.append(
                    (indices.tolist(), noise.tolist() if not workers else None, torch.rand(1).item())
                )
                if len(found) == batches:
                    return found

    torch.manual_seed(1)
    loader, state = job()
    before = train(loader, at)
    kept = snapshot(state)
    # Leaving a loop and beginning another would begin a new epoch: go on with a copy of the run instead.
    torch.manual_seed(1)
    whole = train(job()[0], 18)
    assert whole[:at] == before

    torch.manual_seed(77), np.random.seed(3)
    loader, state = job()
    kept.fill(state)
    assert train(loader, 18 - at) == whole[at:]
