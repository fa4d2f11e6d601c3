"""A voter that is made the only one: on real files, with the engine that runs."""

import asyncio

import pytest
from tests.unit.fastcheckd.registry.test_registry_voter_changes import eventually, house, register, voter

from fastcheckd.errors import ConfigError
from fastcheckd.main import main
from fastcheckd.registry.raft.recovery import KEPT, Recovery


@pytest.mark.parametrize("compact", [False, True])
def test_one_voter_goes_on_alone_with_all_that_its_log_holds(tmp_path, compact):
    async def scenario():
        async with house(tmp_path) as h:
            for i in range(5):
                await h.commit(register(f"n{i}"))
            left = h.follower()
            raft = h.running[left]
            await eventually(lambda: "n4" in raft.read(lambda state: state.nodes))
            if compact:
                raft._engine.forceLogCompaction()
                await eventually(lambda: len(raft._engine.journal) <= 3)
            config = h.config(left, h.first)
            with pytest.raises(ConfigError, match="in use by another registry process"), Recovery(config):
                pass
            for who in list(h.running):
                h.stop(who)

            with Recovery(config) as files:
                before = files.found
            assert set(before.others) == set(h.first) - {left} and before.committed <= before.index
            with Recovery(config) as files:
                assert files.found == before, "nothing was changed"
                kept = files.make_sole()
            assert (
                kept == config.state_dir / KEPT and (kept / "log").exists() and not kept.stat().st_mode & 0o77
            )
            with Recovery(config) as files:
                assert files.found.others == [] and files.found.term > before.term

            alone = h.start(left)
            await h.commit(register("later"))
            assert alone.voters == (left,)
            assert set(alone.read(lambda state: state.nodes)) == {*(f"n{i}" for i in range(5)), "later"}
            # The others come back from their old disks all the same: this voter does not hear them.
            term = alone.term
            for who in h.first:
                if who != left:
                    h.start(who)
            await eventually(lambda: any(r.is_leader for r in h.running.values() if r is not alone))
            assert alone.is_leader and alone.term == term and alone.voters == (left,)
            assert (await alone.propose(register("last"))).ok
            h.stop(left)
            again = h.start(left)
            await eventually(lambda: again.is_leader)
            assert "last" in again.read(lambda state: state.nodes) and again.voters == (left,)

    asyncio.run(scenario())


def test_who_has_nothing_to_go_on_from_is_refused(tmp_path):
    async def scenario():
        async with house(tmp_path) as h:
            for who in list(h.running):
                h.stop(who)
            who = h.first[0]
            other = voter("other")
            with pytest.raises(ConfigError, match="is no voter"):
                Recovery(h.config(other, h.first))
            config = h.config(who, h.first)
            folder = config.state_dir / "registry"
            (folder / "JOIN").touch()
            with pytest.raises(ConfigError, match="holds no registry"), Recovery(config):
                pass
            (folder / "JOIN").unlink()
            (folder / "snapshot").write_bytes(b"x")
            with pytest.raises(ConfigError, match="cannot be used"), Recovery(config):
                pass
            (folder / "snapshot").unlink()
            (folder / "log").unlink()
            with pytest.raises(ConfigError, match="is gone"), Recovery(config):
                pass

    asyncio.run(scenario())


def test_the_command_says_what_is_there_and_does_nothing_without_a_word(tmp_path, capsys):
    async def scenario():
        async with house(tmp_path) as h:
            await h.commit(register("n"))
            return h.first

    first = asyncio.run(scenario())
    path = tmp_path / "node.yaml"
    voters = "".join(
        f"- {{node_id: {v.node_id}, registry_address: '{v.registry_address}', raft_address: '{v.raft_address}'}}\n"
        for v in first
    )
    path.write_text(
        f"cluster_id: test\nnode_id: v0\nstate_dir: {tmp_path / first[0].raft_address}\n"
        f"raft_key_file: {tmp_path / 'key'}\nvoters:\n{voters}"
    )
    command = ["recover-quorum", "--config", str(path)]
    for _ in range(2):
        assert main(command) == 0
        said = capsys.readouterr().out
        assert "voter v0: term" in said and "voters: v0, v1, v2" in said and "nothing was changed" in said
    assert main([*command, "--yes"]) == 0
    assert "votes alone from its next start on, without v1, v2" in capsys.readouterr().out
    assert main([*command, "--yes"]) == 0
    assert "the only voter already" in capsys.readouterr().out
    assert main([*command, "--set", "node_id=other"]) == 78
    assert "is no voter" in capsys.readouterr().err
