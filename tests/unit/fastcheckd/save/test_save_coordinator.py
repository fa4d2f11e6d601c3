"""Saves from the seal to the commit, against real holders: what is sent against what, in which order."""

import asyncio
import threading

import pytest
from tests.unit.fastcheckd.save.save_harness import (
    BUDGET,
    CHUNK,
    layout_of,
    next_step,
    noise,
    running_node,
    running_world,
)
from tests.unit.fastcheckd.transfer.transfer_harness import eventually

from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import layout_pb2
from fastcheck_proto.v1 import registry_pb2 as rpb
from fastcheck_proto.v1 import trainer_pb2 as tpb
from fastcheckd.errors import (
    FastCheckdError,
    FencedError,
    NoQuorumError,
    NotHeldError,
    OverBudgetError,
    SupersededError,
)
from fastcheckd.save.save import SaveKey

STATE = noise(8 * CHUNK)
FENCED = pb.ErrorDetail(code=pb.ERROR_CODE_FENCED, message="another process took its place")
LOSSY = layout_pb2.Precision(momentum=layout_pb2.MOMENTUM_CODING_INDEX8)


def in_world(tmp_path, body, **options):
    async def run():
        async with running_world(tmp_path, **options) as (node, registry, holders):
            await body(node, registry, holders)

    asyncio.run(run())


def held_bytes(store, step, kind=pb.REPLICA_KIND_COPY):
    """The rank's shards of a step as they lie there, by offset."""
    found = {}
    for held in store.held("gpt", step):
        if held.kind == kind:
            into = bytearray(held.manifest.bytes)
            store.copy_to(held, memoryview(into))
            found[held.manifest.offset] = bytes(into)
    return found


def whole(parts):
    return b"".join(data for _, data in sorted(parts.items()))


def copies(holders, step):
    return whole({k: v for holder in holders for k, v in held_bytes(holder.store, step).items()})


def test_a_step_is_sent_against_the_one_before(tmp_path):
    async def body(node, registry, holders):
        first = await node.save(1, STATE)
        second = await node.save(2, next_step(STATE))
        assert first.encoded_bytes >= len(STATE) > 6 * second.encoded_bytes
        assert "raw" not in {use.codec for use in second.codecs}
        assert node.counters.get("bytes_saved") >= len(STATE) - second.encoded_bytes - 1000
        assert copies(holders, 1) == STATE
        assert copies(holders, 2) == next_step(STATE)
        assert not second.lossy and second.encode_s >= 0

    in_world(tmp_path, body)


def test_what_codec_never_sends_is_raw_and_only_what_changed(tmp_path):
    async def body(node, registry, holders):
        first = await node.save(1, STATE)
        assert first.encoded_bytes == len(STATE)
        assert [use.codec for use in first.codecs] == ["raw"]
        second = await node.save(2, next_step(STATE))
        assert second.encoded_bytes == CHUNK
        assert [use.codec for use in second.codecs] == ["raw", "same"]
        assert node.counters.get("chunks_encoded") == 0
        assert copies(holders, 2) == next_step(STATE)

    in_world(tmp_path, body, codec="never")


def test_figures_are_per_copy(tmp_path):
    async def body(node, registry, holders):
        registry.tolerate = 2
        save = await node.save(1, STATE)
        assert save.copies == 2 and save.encoded_bytes == len(STATE)
        assert sum(use.raw_bytes for use in save.codecs) == len(STATE)
        report = save.report()
        assert (report.encoded_bytes, list(report.codecs)) == (len(STATE), save.codecs)

    in_world(tmp_path, body)


def test_a_step_waits_until_the_one_before_is_sent_and_is_then_sent_against_it(tmp_path):
    async def body(node, registry, holders):
        registry.unplaceable = {1}
        first = await node.stage(1, STATE)
        second = await node.stage(2, next_step(STATE))
        await eventually(lambda: first.stalled_because is not None)
        assert second.state == tpb.SAVE_STATE_STAGED
        assert not any(holder.counters.get("shards_received") for holder in holders)
        registry.unplaceable = set()
        await node.done(first)
        await node.done(second)
        assert "raw" not in {use.codec for use in second.codecs}

    in_world(tmp_path, body)


def test_a_step_does_not_wait_for_the_commit_of_the_one_before(tmp_path):
    async def body(node, registry, holders):
        registry.answers = [NoQuorumError("no leader")] * 3
        first = await node.stage(1, STATE)
        await first.until_sent()
        second = await node.stage(2, next_step(STATE))
        async with asyncio.timeout(10):
            await second.until_sent()
        await node.done(first)
        await node.done(second)

    in_world(tmp_path, body)


def test_other_ranks_do_not_wait(tmp_path):
    async def body(node, registry, holders):
        registry.unplaceable = {1}
        await node.stage(1, STATE)
        await node.done(await node.stage(5, STATE, rank=1))

    in_world(tmp_path, body)


def test_a_step_that_is_given_up_lets_the_next_one_go(tmp_path):
    async def body(node, registry, holders):
        registry.unplaceable = {1, 2}
        first = await node.stage(1, STATE)
        second = await node.stage(2, STATE)
        await eventually(lambda: first.stalled_because is not None)
        registry.unplaceable = {1}
        await node.save(3, STATE)
        with pytest.raises(SupersededError):
            await node.done(first)
        await node.done(second)
        await eventually(lambda: {held.key.step for held in node.store.held("gpt")} == {2, 3})
        (stream,) = node.sessions.values()
        await eventually(lambda: len(stream.held) == 2)
        assert node.store.count_segments("staging.gpt.0.1") == 4

    in_world(tmp_path, body, stall_after_s=0.3)


def test_shards_end_where_chunks_end(tmp_path):
    lengths = (3 * CHUNK, CHUNK // 2, CHUNK // 2, 4 * CHUNK)

    async def body(node, registry, holders):
        await node.save(1, STATE, layout_of(*lengths))
        record = registry.reports[-1].record
        assert [(s.offset, s.bytes) for s in record.shards] == [
            (0, sum(lengths[:3])),
            (sum(lengths[:3]), lengths[3]),
        ]
        listed = {h.manifest.offset: list(h.manifest.chunk_lengths) for h in node.store.held("gpt", 1)}
        assert listed == {0: list(lengths[:3]), sum(lengths[:3]): [lengths[3]]}
        second = await node.save(2, next_step(STATE), layout_of(*lengths))
        assert second.encoded_bytes < 3.2 * CHUNK
        # Other chunks: nothing to compare with.
        third = await node.save(3, next_step(STATE), layout_of(*lengths[::-1]))
        assert third.encoded_bytes >= len(STATE)
        assert copies(holders, 3) == next_step(STATE)

    in_world(tmp_path, body)


def test_a_holder_lost_before_the_commit_is_replaced_by_a_whole_copy(tmp_path):
    async def body(node, registry, holders):
        await node.save(1, STATE)
        lost = rpb.ReportResponse(
            state=rpb.REPORT_STATE_REFUSED,
            error=pb.ErrorDetail(code=pb.ERROR_CODE_HOLDER_LOST),
            lost_holders=[registry.holders[0].node],
        )
        registry.answers = [lost]
        registry.holders = registry.holders[1:]
        save = await node.save(2, next_step(STATE))
        assert save.copies == 1
        assert whole(held_bytes(holders[1].store, 2)) == next_step(STATE)
        names = {h.node_id for s in registry.reports[-1].record.shards for h in s.holders}
        assert names == {"node-2"}

    in_world(tmp_path, body)


def test_a_restarted_node_carries_on_with_the_same_chunks_and_shards(tmp_path):
    lengths = (3 * CHUNK, CHUNK // 2, CHUNK // 2, 4 * CHUNK)

    async def body(node, registry, holders):
        registry.answers = [NoQuorumError("no leader")] * 1000
        save = await node.stage(1, STATE, layout_of(*lengths))
        await save.until_sent()
        await node.coordinator.stop()
        node.store.close()
        registry.answers = []
        registry.holders = registry.holders[:1]  # fewer than there are shards
        async with running_node(tmp_path, registry) as again:
            assert again.coordinator.resume() == 1
            request = SaveKey("gpt", 0, 1), 1
            await again.done(await again.coordinator.find(*request))
            record = registry.reports[-1].record
            assert [s.offset for s in record.shards] == [0, sum(lengths[:3])]
            # And the next step has it as its base.
            second = await again.save(2, next_step(STATE), layout_of(*lengths))
            assert second.error is None

    in_world(tmp_path, body)


@pytest.mark.parametrize("at", [0, -1])
def test_a_shard_that_is_found_corrupt_while_several_ranks_resume_stops_only_its_own(tmp_path, at):
    async def body(node, registry, holders):
        registry.answers = [NoQuorumError("no leader")] * 1000
        for rank in range(2):
            await (await node.stage(1, STATE, rank=rank)).until_sent()
        await node.coordinator.stop()
        node.store.close()
        registry.answers = []
        async with running_node(tmp_path, registry) as again:
            with (tmp_path / "owner" / "segments" / segment_of(again.store, rank=0)).open("r+b") as staged:
                staged.seek(at % len(STATE))
                staged.write(b"\xff")

            def scrubbed_meanwhile(job):
                """The scrub runs in threads of its own: here it comes to rank 0 just as that is looked at."""
                for held in [h for h in again.store.held("gpt") if h.key.rank == 0]:
                    again.store.verify(held)

            again.coordinator._view.newest_step = scrubbed_meanwhile
            assert again.coordinator.resume() == 1
            request = SaveKey("gpt", 1, 1), 1
            await again.done(await again.coordinator.find(*request))
            with pytest.raises(NotHeldError, match="not known here"):
                await again.coordinator.find(SaveKey("gpt", 0, 1), 1)

    in_world(tmp_path, body)


def segment_of(store, rank):
    (name,) = {held.segment.name for held in store.held("gpt") if held.key.rank == rank}
    return name


class Quantiser:
    """A lossy coding that can be recognised: clears the lowest bit of every byte, once."""

    def __init__(self):
        self.lock = threading.Lock()
        self.calls = []

    def quantise(self, chunk, base, plan):
        assert plan.precision == LOSSY and not chunk.readonly
        with self.lock:
            self.calls.append((bytes(chunk[:16]), None if base is None else len(base) == len(chunk)))
        chunk[:] = cleared(chunk)


def cleared(data):
    return bytes(byte & 0xFE for byte in data)


@pytest.fixture
def quantiser(monkeypatch):
    """Stands for the real one: this is about when it is called, on what, and how often."""
    found = Quantiser()
    monkeypatch.setattr("fastcheckd.save.content.quantise", found.quantise)
    return found


LAYOUT = layout_of(*[CHUNK] * 8, precision=LOSSY)


def test_a_lossy_step_is_the_same_bytes_everywhere_and_called_lossy(tmp_path, quantiser):
    async def body(node, registry, holders):
        registry.tolerate = 2
        save = await node.save(1, STATE, LAYOUT)
        assert len(quantiser.calls) == 8 and all(base is None for _, base in quantiser.calls)
        assert whole(held_bytes(node.store, 1, pb.REPLICA_KIND_OWNER)) == cleared(STATE)
        for holder in holders:
            assert whole(held_bytes(holder.store, 1)) == cleared(STATE)
        assert save.lossy and save.report().lossy and registry.reports[-1].record.lossy
        assert all(h.manifest.lossy for s in (node, *holders) for h in s.store.held("gpt"))
        await node.save(2, next_step(STATE), LAYOUT)
        assert len(quantiser.calls) == 16 and all(base for _, base in quantiser.calls[8:])
        exact = await node.save(3, next_step(STATE), layout_of(*[CHUNK] * 8))
        assert not exact.lossy and not registry.reports[-1].record.lossy
        assert len(quantiser.calls) == 16

    in_world(tmp_path, body)


def test_the_base_of_a_lossy_step_is_there_even_when_nothing_is_encoded(tmp_path, quantiser):
    async def body(node, registry, holders):
        await node.save(1, STATE, LAYOUT)
        await node.save(2, STATE, LAYOUT)
        assert all(base for _, base in quantiser.calls[8:]) and len(quantiser.calls) == 16

    in_world(tmp_path, body, codec="never")


def test_a_step_that_was_committed_before_the_restart_is_called_so(tmp_path):
    async def body(node, registry, holders):
        save = await node.save(1, STATE)
        assert save.error is None
        await node.coordinator.stop()
        node.store.close()
        async with running_node(tmp_path, registry) as again:
            kept = rpb.JobView(job="gpt", kept_steps=[1])
            again.coordinator._view.view = rpb.ClusterView(jobs=[kept])
            assert again.coordinator.resume() == 0
            stream = await again.session()
            # The same process says again what it had sealed; another process' step of that number is not this one's.
            for session in (1, 2):
                await again.coordinator.sealed(stream, tpb.Sealed(segment_id="x", step=1, session=session))
            await eventually(lambda: len(stream._outbox) == 3)
            assert stream._outbox["step", 1, 1].progress.state == tpb.SAVE_STATE_COMMITTED
            assert "restarted" in stream._outbox["refused", 2, 1].refused.error.message

    in_world(tmp_path, body)


def test_a_resumed_lossy_step_is_lossy_and_not_made_so_twice(tmp_path, quantiser):
    async def body(node, registry, holders):
        registry.answers = [NoQuorumError("no leader")] * 1000
        save = await node.stage(1, STATE, LAYOUT)
        await save.until_sent()
        await node.coordinator.stop()
        node.store.close()
        registry.answers = []
        async with running_node(tmp_path, registry) as again:
            assert again.coordinator.resume() == 1
            resumed = await again.coordinator.find(SaveKey("gpt", 0, 1), 1)
            await again.done(resumed)
        assert resumed.lossy and registry.reports[-1].record.lossy and len(quantiser.calls) == 8

    in_world(tmp_path, body)


def test_with_little_memory_the_older_step_is_kept_as_a_reverse_delta(tmp_path):
    async def body(node, registry, holders):
        state, pool = STATE, "staging.gpt.0.1"
        for step in range(1, 6):
            await node.save(step, state)
            older = node.store.held("gpt", step - 1)
            assert [held.is_whole for held in older] == [False] * len(older)
            assert whole(held_bytes_kept(node.store, step)) == state
            state = next_step(state, step)
        assert node.store.count_segments(pool) == 2
        assert node.counters.get("deltas_made") == 4 * 8

    in_world(tmp_path, body, ram_budget_bytes=3 * len(STATE))


def test_memory_is_little_only_for_what_is_kept_here(tmp_path):
    async def body(node, registry, holders):
        await node.session(world_size=1)
        state = STATE
        for step in (1, 2, 3):  # nothing of others comes here
            await node.save(step, state)
            state = next_step(state, step)
        assert node.counters.get("deltas_made") == 0

    in_world(tmp_path, body, ram_budget_bytes=4 * len(STATE))


def held_bytes_kept(store, step):
    """The owner's shards of a step, without making them full."""
    found = {}
    for held in store.held("gpt", step):
        into = bytearray(held.manifest.bytes)
        store.copy_to(held, memoryview(into))
        found[held.manifest.offset] = bytes(into)
    return found


def test_a_step_that_is_not_committed_leaves_the_one_before_as_it_is(tmp_path):
    async def body(node, registry, holders):
        await node.save(1, STATE)
        registry.answers = [
            rpb.ReportResponse(
                state=rpb.REPORT_STATE_REFUSED, error=pb.ErrorDetail(code=pb.ERROR_CODE_FENCED, message="no")
            )
        ]
        with pytest.raises(FastCheckdError):
            await node.save(2, next_step(STATE))
        assert all(held.is_whole for held in node.store.held("gpt", 1))
        usage = node.store.usage()
        held = sum({held.segment: held.segment.size_bytes for held in node.store.held("gpt")}.values())
        assert usage.used_bytes - usage.free_bytes == held, "the reverse delta is given back"

    in_world(tmp_path, body, ram_budget_bytes=5 * len(STATE))


def test_segments_are_as_many_as_steps_that_are_kept_or_may_be_under_way(tmp_path):
    async def body(node, registry, holders):
        stream = await node.session()
        await node.segment(stream, len(STATE))
        pool = "staging.gpt.0.1"
        await eventually(lambda: node.store.count_segments(pool) == 4)
        assert len(stream.held) == 2, "no more than may be under way at once"
        registry.waiting = True
        await node.stage(1, STATE)
        await node.stage(2, next_step(STATE))
        assert not stream.held, "the third step waits for the first"
        coming = asyncio.create_task(node.stage(3, next_step(STATE, 1)))
        await asyncio.sleep(0.3)
        assert not coming.done() and node.store.count_segments(pool) == 4
        registry.waiting = False
        await node.done(await coming)
        for held in node.store.held("gpt", 1):
            node.store.drop(held)
        node.coordinator.supply.tidied({})
        await eventually(lambda: len(stream.held) == 2)
        assert node.counters.get("save_waits") == 1

    in_world(tmp_path, body)


def test_with_a_lean_contract_a_step_waits_for_the_one_under_way(tmp_path):
    async def body(node, registry, holders):
        await node.save(1, STATE)
        registry.waiting = True
        under_way = await node.stage(2, next_step(STATE))
        coming = asyncio.create_task(node.stage(3, next_step(STATE, 1)))
        await eventually(lambda: under_way.sent)
        await asyncio.sleep(0.3)
        assert not coming.done()
        registry.waiting = False
        await node.done(under_way)
        for held in node.store.held("gpt", 1):
            node.store.drop(held)
        await node.done(await coming)
        assert node.store.count_segments("staging.gpt.0.1") == 2

    in_world(tmp_path, body, keep_steps=1, ram_budget_bytes=2 * len(STATE))


def test_a_refusal_for_want_of_room_says_who_has_it(tmp_path):
    async def body(node, registry, holders):
        node.store.allocate(BUDGET - len(STATE) // 2, "staging.other.0.1")
        with pytest.raises(OverBudgetError) as refused:
            await node.stage(1, STATE)
        told = str(refused.value)
        assert (
            "needs 2 segments" in told
            and f"bytes, for its newest step and the next; {BUDGET - len(STATE) // 2}" in told
        )
        assert "ram_budget_bytes is enough for that" in told, "it would do if no other job were here"
        assert f"; bytes in use: job 'other' {BUDGET - len(STATE) // 2}" in told

    in_world(tmp_path, body)


def test_as_the_last_resort_the_owners_bytes_of_an_older_step_go(tmp_path):
    async def body(node, registry, holders):
        node.store.allocate(BUDGET - 5 * len(STATE) // 2, "staging.other.0.1")
        for step in (1, 2):
            await node.save(step, noise(8 * CHUNK, step))  # no reverse delta is smaller than the step
        assert [held.is_whole for held in node.store.held("gpt")] == [True] * 4
        await node.save(3, noise(8 * CHUNK, 3))
        assert {held.key.step for held in node.store.held("gpt")} == {2, 3}
        assert node.counters.get("own_steps_dropped") == 1
        assert copies(holders, 1) == noise(8 * CHUNK, 1)

    in_world(tmp_path, body)


def test_the_newest_committed_step_never_goes(tmp_path):
    async def body(node, registry, holders):
        node.store.allocate(BUDGET - 5 * len(STATE) // 2, "staging.other.0.1")
        await node.save(1, STATE)
        with pytest.raises(OverBudgetError):
            await node.stage(2, 2 * STATE)
        assert whole(held_bytes_kept(node.store, 1)) == STATE

    in_world(tmp_path, body)


def test_of_steps_that_another_rank_does_not_save_the_newest_few_stay(tmp_path):
    async def body(node, registry, holders):
        await node.save(1, STATE)
        registry.waiting, registry.absent = True, [1]
        for step in range(2, 12):
            await node.stage(step, next_step(STATE, step))
        await eventually(lambda: {h.key.step for h in node.store.held("gpt")} <= {1, *range(7, 12)})
        assert {h.key.step for h in node.store.held("gpt")} >= {1, 7, 8, 9}
        last = registry.superseded[-1]
        assert (last.job, last.rank, last.session, last.owner.node_id, last.below_step) == (
            "gpt",
            0,
            1,
            "owner",
            7,
        )
        registry.waiting = False
        await node.save(12, STATE)

    in_world(tmp_path, body, stall_after_s=0.05)


def test_a_new_process_makes_room_of_what_the_one_before_left_uncommitted(tmp_path):
    async def body(node, registry, holders):
        await node.save(1, STATE)
        registry.waiting, registry.absent = True, [1]
        under_way = [await node.stage(step, next_step(STATE, step)) for step in (2, 3)]
        await eventually(lambda: all(save.sent for save in under_way))
        registry.answers = [rpb.ReportResponse(state=rpb.REPORT_STATE_REFUSED, error=FENCED)] * 2
        registry.waiting = False
        for save in under_way:
            with pytest.raises(FencedError):
                await node.done(save)
        node.store.allocate(BUDGET - 7 * len(STATE) // 2, "staging.other.0.1")
        node.coordinator._view.view = rpb.ClusterView(
            version=1, jobs=[rpb.JobView(job="gpt", kept_steps=[1], next_session=3)]
        )
        registry.session = 2
        saved = await node.stage(2, STATE, session=2)
        await node.done(saved)
        assert {(h.key.step, h.manifest.session) for h in node.store.held("gpt")} >= {(1, 1), (2, 2)}

    in_world(tmp_path, body)
