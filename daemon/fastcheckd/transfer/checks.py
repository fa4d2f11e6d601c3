"""Whether an offer may be taken and a manifest believed: every check that needs no memory and no store. Pure.

All of it happens before anything is reserved, so a malformed or stale request costs nothing.
"""

from __future__ import annotations

from fastcheck_proto.conventions import RANK_MAX, REQUEST_BYTES_MAX, STEP_MAX, check_name
from fastcheck_proto.v1 import common_pb2 as pb
from fastcheck_proto.v1 import peer_pb2

from ..chunks import ChunkTable
from ..digests import DIGEST_BYTES
from ..errors import CorruptError, FencedError, InvalidRequestError, OverBudgetError
from .frames import CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, STREAMS_MAX

SHARDS_MAX = 65536
#: The digests of all chunks travel in one message, beside little else.
CHUNKS_MAX = REQUEST_BYTES_MAX // 2 // DIGEST_BYTES
#: Earlier steps that a reader may name.
BASES_MAX = 4
#: Given-up steps that one offer may name.
OBSOLETE_MAX = 16
#: Nodes that one offer may name.
SOURCES_MAX = 16
SAVE_ID_BYTES_MAX = 64


def check_offer(
    request: peer_pb2.ReplicateRequest,
    *,
    cluster_id: str,
    incarnation: int,
    epoch: int,
    budget_bytes: int,
) -> None:
    """Check an offer against this node's cluster, present incarnation (0: none yet) and newest epoch.

    Raises:
        FencedError: it was made for another life of this node or by an older membership.
        InvalidRequestError: for another cluster, or malformed.
        OverBudgetError: the shard alone is more than the whole budget.
    """
    check_cluster(request.cluster_id, cluster_id)
    check_life(request.holder_incarnation, incarnation)
    # Without a registry to ask, the sender's epoch may be old; that membership stands still meanwhile.
    if request.epoch < epoch and not request.provisional:
        raise FencedError(
            f"the offer was made in epoch {request.epoch}, this node knows of {epoch}: place the shard again"
        )
    check_key(request.key)
    _need(len(request.digest) == DIGEST_BYTES, "a digest has 16 bytes")
    _need(1 <= len(request.sources) <= SOURCES_MAX, f"an offer names 1 to {SOURCES_MAX} sources")
    for source in request.sources:
        _check_name("source", source.node.node_id)
    _need(
        len(request.obsolete_steps) <= OBSOLETE_MAX,
        f"more than {OBSOLETE_MAX} obsolete steps are named at once",
    )
    if request.bytes > budget_bytes:
        raise OverBudgetError(
            f"a shard of {request.bytes} bytes is more than this node's whole RAM budget of {budget_bytes} bytes"
        )


def check_open(request: peer_pb2.OpenRequest, cluster_id: str) -> None:
    """Raise InvalidRequestError unless a request to open a replica is well-formed and meant for this cluster."""
    check_cluster(request.cluster_id, cluster_id)
    check_key(request.key)
    _need(request.streams <= STREAMS_MAX, f"streams {request.streams} is more than {STREAMS_MAX}")
    _need(len(request.bases) <= BASES_MAX, f"{len(request.bases)} bases are more than {BASES_MAX}")
    _need(all(len(base.digest) == DIGEST_BYTES for base in request.bases), "a base's digest has 16 bytes")
    _need(len(request.reader) <= 128, "a reader's name has at most 128 characters")


def check_copy(manifest: pb.ShardManifest, node_id: str) -> None:
    """Whether a manifest, proved by its digest, may become a copy on this node.

    Raises:
        CorruptError: it contradicts itself.
        InvalidRequestError: it is of a shard that this node owns.
    """
    try:
        _check_name("owner", manifest.owner)
        _need(manifest.world_size <= RANK_MAX, f"world_size {manifest.world_size} is more than {RANK_MAX}")
        _need(manifest.key.rank < manifest.world_size, "the rank is not below world_size")
        _need(manifest.shard_count <= SHARDS_MAX, f"shard_count {manifest.shard_count} is above {SHARDS_MAX}")
        _need(manifest.key.shard < manifest.shard_count, "the shard is not below shard_count")
        _need(len(manifest.save_id) <= SAVE_ID_BYTES_MAX, f"save_id is longer than {SAVE_ID_BYTES_MAX}")
        _need(manifest.offset + manifest.bytes <= manifest.state_bytes, "the shard is not within its state")
        _need(
            manifest.header_offset + manifest.header_bytes <= manifest.state_bytes,
            "the state header is not within its state",
        )
    except InvalidRequestError as error:
        raise CorruptError(f"the manifest of a source contradicts itself: {error}") from None
    if manifest.owner == node_id:
        raise InvalidRequestError(f"node {node_id} cannot hold a copy of its own shard")


def chunk_table(manifest: pb.ShardManifest) -> ChunkTable:
    """The chunks of a shard that somebody else describes; nothing is built before their number is bounded.

    Raises:
        InvalidRequestError: too many, or not a shard of that size together.
    """
    _need(
        CHUNK_BYTES_MIN <= manifest.chunk_bytes <= CHUNK_BYTES_MAX,
        f"chunk_bytes {manifest.chunk_bytes} is not from 64 KiB to 16 MiB",
    )
    chunks = len(manifest.chunk_lengths) or -(-manifest.bytes // manifest.chunk_bytes)
    _need(chunks <= CHUNKS_MAX, f"a shard of {chunks} chunks is more than {CHUNKS_MAX}: use larger chunks")
    return ChunkTable.of(manifest)


def check_cluster(given: str, own: str) -> None:
    """Raise InvalidRequestError when a request is meant for another cluster."""
    if given != own:
        raise InvalidRequestError(f"this node belongs to cluster {own!r}, the request is for {given[:128]!r}")


def check_life(wanted: int, own: int) -> None:
    """Raise FencedError when an offer is meant for another incarnation than this node's own."""
    if own == 0:
        raise FencedError(
            "this node has no incarnation yet: its agent has not registered it; try another holder"
        )
    if wanted != own:
        raise FencedError(
            f"the offer is for incarnation {wanted} of this node, it is in {own}: place the shard again"
        )


def check_key(key: pb.ShardKey) -> None:
    """Raise InvalidRequestError unless the key can name a shard."""
    _check_name("job", key.job)
    _need(key.step <= STEP_MAX, f"step {key.step} is more than {STEP_MAX}")
    _need(key.rank < RANK_MAX, f"rank {key.rank} is not below {RANK_MAX}")
    _need(key.shard < SHARDS_MAX, f"shard {key.shard} is not below {SHARDS_MAX}")


def _check_name(what: str, name: str) -> None:
    try:
        check_name(what, name)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None


def _need(ok: bool, why: str) -> None:
    if not ok:
        raise InvalidRequestError(f"malformed request: {why}")
