"""What a Trainer resumes from when memory is out of reach, or older than its disk."""

from types import SimpleNamespace

import pytest
import torch
from tests.unit.fastcheck.fake_daemon import FakeDaemon

from fastcheck import Checkpointer


@pytest.fixture
def out_of_reach(tmp_path):
    with Checkpointer("gpt", address=f"unix://{tmp_path}/nobody.sock", timeout_s=0.1) as ckpt:
        yield ckpt


@pytest.fixture
def at_step_7(tmp_path):
    with FakeDaemon(tmp_path) as daemon, Checkpointer("gpt", address=daemon.address) as ckpt:
        ckpt.save(7, {"w": torch.ones(2)}).result(timeout=60)
        yield ckpt


def test_a_hugging_face_trainer_takes_the_newest_complete_folder(out_of_reach, tmp_path, caplog):
    module = pytest.importorskip("fastcheck.integrations.transformers")
    folder = tmp_path / "out"
    args = SimpleNamespace(output_dir=str(folder), deepspeed=None, fsdp=None)
    trainer = SimpleNamespace(
        args=args, accelerator=SimpleNamespace(scaler=None), model=torch.nn.Linear(2, 2)
    )
    callback = module.FastCheckCallback(out_of_reach)
    assert callback.resume(trainer) is None
    assert "the newest checkpoint on disk counts" in caplog.text
    for step in (20, 100, 40):
        (folder / f"checkpoint-{step}").mkdir(parents=True)
        (folder / f"checkpoint-{step}" / "trainer_state.json").touch()
    (folder / "checkpoint-best").mkdir()
    assert callback.resume(trainer) == str(folder / "checkpoint-100")
    (folder / "checkpoint-120").mkdir()  # the Trainer was killed while it wrote that
    assert callback.resume(trainer) == str(folder / "checkpoint-100")


@pytest.mark.parametrize("ckpt", ["out_of_reach", "at_step_7"])
def test_lightning_takes_the_newest_file_unless_memory_is_as_new(request, ckpt, tmp_path):
    module = pytest.importorskip("fastcheck.integrations.lightning")
    io = module.FastCheckIO(request.getfixturevalue(ckpt))
    folder, memory = tmp_path / "files", "fastcheck://gpt" if ckpt == "at_step_7" else None
    assert io.newest(folder) == memory
    (folder / "deep").mkdir(parents=True)
    for name in ("epoch=0-step=6.ckpt", "last.ckpt"):
        (folder / "deep" / name).touch()
    assert io.newest(folder) == (memory or str(folder / "deep" / "epoch=0-step=6.ckpt"))
    (folder / "epoch=0-step=7.ckpt").touch()
    assert io.newest(folder) == (memory or str(folder / "epoch=0-step=7.ckpt"))
    (folder / "epoch=1-step=10.ckpt").touch()
    assert io.newest(folder) == str(folder / "epoch=1-step=10.ckpt")
