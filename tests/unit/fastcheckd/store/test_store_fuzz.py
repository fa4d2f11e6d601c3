"""Manifests with anything in them and a right digest, in the directory of a store that starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from store_helpers import open_store, payload, put
from tests.fuzzing import examples, messages

from fastcheck_proto.v1 import store_pb2
from fastcheckd.digests import chunk_digest, shard_digest
from fastcheckd.errors import CorruptError
from fastcheckd.store.manifests import decode

DATA = [payload(seed, 9000 + seed) for seed in range(3)]
FUZZED = 1
SEGMENT = "0123456789abcdef" * 2 + ".seg"
WAY = "0123456789abcdef" * 2 + ".way"
stored_shards = messages(store_pb2.StoredShard.DESCRIPTOR, [SEGMENT, WAY, "gpt", "node-0"])


def sealed(stored: Message) -> bytes:
    body: bytes = stored.SerializeToString()
    return body + chunk_digest(body)


@examples(40)
@given(stored_shards)
def test_any_manifest_is_whole_or_refused(stored):
    try:
        assert decode(sealed(stored)) == stored
    except CorruptError as error:
        assert str(error)


def changed(real: store_pb2.StoredShard, other: Message, names: list[str]) -> store_pb2.StoredShard:
    """A real one with some fields of another, as long as the chunks' digest fits: or it would be seen by that alone."""
    made = store_pb2.StoredShard()
    made.CopyFrom(real)
    for name in names:
        outer, _, inner = name.partition(".")
        into, source = (getattr(made, outer), getattr(other, outer)) if inner else (made, other)
        into.ClearField(inner or outer)
        taken = type(source)()
        taken.CopyFrom(source)
        for field, _ in source.ListFields():
            if field.name != (inner or outer):
                taken.ClearField(field.name)
        into.MergeFrom(taken)
    made.manifest.digest = shard_digest(made.manifest.chunk_digests)
    return made


FIELDS = [f.name for f in store_pb2.StoredShard.DESCRIPTOR.fields if f.name != "manifest"] + [
    f"manifest.{f.name}"
    for f in store_pb2.StoredShard.DESCRIPTOR.fields_by_name["manifest"].message_type.fields
]


#: Where bytes are looked for, and whose they are.
PLACES = ["segment", "segment_offset", "way_back", "manifest.key", "manifest.kind"]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that a process left, with steps 0, 1 and 2."""
    folder = tmp_path_factory.mktemp("left")
    store, _ = open_store(folder / "ram")
    for step, data in enumerate(DATA):
        put(store, data, step=step)
    store.close()
    return folder / "ram"


def test_a_store_starts_with_any_manifest_and_keeps_the_good_ones(left, tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(b"not the store's")
    real, others = (
        decode((left / "manifests" / "gpt" / f"{step}-0-0-copy.shard").read_bytes()) for step in (FUZZED, 0)
    )
    known = [real.segment, others.segment, WAY, "gpt", "node-0", "../outside"]

    @examples(40)
    @given(
        other=messages(store_pb2.StoredShard.DESCRIPTOR, known),
        names=st.lists(st.sampled_from(PLACES) | st.sampled_from(FIELDS), min_size=1, max_size=2),
    )
    def starts(other, names):
        ram = tmp_path / "ram"
        shutil.rmtree(ram, ignore_errors=True)
        shutil.copytree(left, ram)
        file = ram / "manifests" / "gpt" / f"{FUZZED}-0-0-copy.shard"
        file.write_bytes(sealed(changed(real, other, names)))
        store, _ = open_store(ram)
        try:
            for held in store.held():
                with held.view as view:
                    assert len(view) == held.manifest.bytes
                if held.key.step != FUZZED:
                    assert store.verify(held)
            kept = {held.key.step for held in store.held("gpt")}
            assert kept >= {0, 2}
        finally:
            store.close()
        assert outside.read_bytes() == b"not the store's"

    starts()
