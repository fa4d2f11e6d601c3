"""Manifests with anything in them and a right digest, in the directory of a store that starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from store_helpers import COPY, OWNER, open_store, put, read, stage, thin, trained, weights
from tests.fuzzing import examples, messages

from fastcheck_proto.v1 import store_pb2
from fastcheckd.digests import chunk_digest, shard_digest
from fastcheckd.errors import CorruptError
from fastcheckd.store.manifests import decode

#: Copies of steps 0 to 2, the older ones reverse deltas; likewise of the owner's own.
DATA = [weights(1, 3 * 4096)]
for _step in (1, 2):
    DATA.append(trained(DATA[-1], _step))
FUZZED = 1
SLAB = "0123456789abcdef" * 2 + ".slab"
SEGMENT = "0123456789abcdef" * 2 + ".seg"
stored_replicas = messages(store_pb2.StoredReplica.DESCRIPTOR, [SEGMENT, SLAB, "gpt", "node-0"])


def sealed(stored: Message) -> bytes:
    body: bytes = stored.SerializeToString()
    return body + chunk_digest(body)


@examples(40)
@given(stored_replicas)
def test_any_manifest_is_whole_or_refused(stored):
    try:
        assert decode(sealed(stored)) == stored
    except CorruptError as error:
        assert str(error)


def changed(real: store_pb2.StoredReplica, other: Message, names: list[str]) -> store_pb2.StoredReplica:
    """A real one with some fields of another, as long as the chunks' digest fits: or it would be seen by that alone."""
    made = store_pb2.StoredReplica()
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


FIELDS = [f.name for f in store_pb2.StoredReplica.DESCRIPTOR.fields if f.name != "manifest"] + [
    f"manifest.{f.name}"
    for f in store_pb2.StoredReplica.DESCRIPTOR.fields_by_name["manifest"].message_type.fields
]


#: Where bytes are looked for, and whose they are.
PLACES = ["files", "places", "base_digests", "manifest.key", "manifest.kind"]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that a process left."""
    folder = tmp_path_factory.mktemp("left")
    store = open_store(folder / "ram")
    copy = own = None
    for step, data in enumerate(DATA):
        copy = put(store, data, step, base=copy, chunk_bytes=4096)
        older, own = own, stage(store, data, step, chunk_bytes=4096)
        if older is not None:
            thin(store, older, own)
    store.close()
    return folder / "ram"


@pytest.mark.parametrize("kind", ["copy", "owner"])
def test_a_store_starts_with_any_manifest_and_serves_nothing_wrong(left, tmp_path, kind):
    outside = tmp_path / "outside"
    outside.write_bytes(b"not the store's")
    real, others = (
        decode((left / "manifests" / "gpt" / f"{step}-0-0-{kind}.replica").read_bytes())
        for step in (FUZZED, 0)
    )
    known = [*real.files, *others.files, SLAB, "gpt", "node-0", "../outside"]

    @examples(40)
    @given(
        other=messages(store_pb2.StoredReplica.DESCRIPTOR, known),
        names=st.lists(st.sampled_from(PLACES) | st.sampled_from(FIELDS), min_size=1, max_size=2),
    )
    def starts(other, names):
        ram = tmp_path / "ram"
        shutil.rmtree(ram, ignore_errors=True)
        shutil.copytree(left, ram)
        file = ram / "manifests" / "gpt" / f"{FUZZED}-0-0-{kind}.replica"
        file.write_bytes(sealed(changed(real, other, names)))
        store = open_store(ram)
        try:
            kept = {(held.kind, held.key.step) for held in store.held("gpt")}
            # Each manifest says all that is needed for itself.
            others_kinds = [k for k in (OWNER, COPY) if k != real.manifest.kind]
            assert kept >= {(real.manifest.kind, 0), (real.manifest.kind, 2)}
            assert kept >= {(k, step) for k in others_kinds for step in range(3)}
            for held in store.held():
                if held.key.step != FUZZED or held.kind != real.manifest.kind:
                    assert read(store, held) == DATA[held.key.step]
                    continue
                try:
                    read(store, held)  # what has the right digests is right
                except CorruptError:
                    assert store.find(held.key, held.kind) is None
        finally:
            store.close()
        assert outside.read_bytes() == b"not the store's"

    starts()
