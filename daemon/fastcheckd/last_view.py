"""The last view of the cluster, kept in a file for a process that starts while no registry answers.

It is where to look for nodes, and never a reason to drop or to commit anything. A file that is damaged, too large or
another cluster's is as good as none.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets

from google.protobuf.message import DecodeError

from fastcheck_proto.conventions import check_name
from fastcheck_proto.v1 import registry_pb2 as rpb

from .config import Config, split_address
from .digests import DIGEST_BYTES, chunk_digest
from .errors import CorruptError, StoreError
from .store import directory as files

logger = logging.getLogger(__name__)

FILE_NAME = "last-view"
#: 4096 nodes and 4096 jobs take far less.
FILE_BYTES_MAX = 16 << 20
NODES_MAX = 4096


class LastView:
    """One node's file. All methods block."""

    def __init__(self, config: Config) -> None:
        self._cluster_id = config.cluster_id
        self._path = config.state_dir / FILE_NAME

    def is_ours(self, view: rpb.ClusterView) -> bool:
        """Whether a view is of this node's cluster and no other that took over a dead voter's address."""
        return view.cluster_id == self._cluster_id

    def read(self) -> rpb.ClusterView | None:
        """What was kept last, if it can be used."""
        try:
            return self._parse(files.read_bounded(self._path, FILE_BYTES_MAX))
        except StoreError as error:
            if self._path.exists():
                logger.warning("the kept view of the cluster is not used: %s", error)
            return None

    def keep(self, view: rpb.ClusterView) -> None:
        """Take the place of what was kept, atomically.

        Raises:
            OSError: it cannot be written; what was kept stays.
        """
        body: bytes = view.SerializeToString()
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        staged = self._path.with_name(f"{FILE_NAME}-{secrets.token_hex(8)}.tmp")
        try:
            files.write_new(staged, body + chunk_digest(body))
            os.replace(staged, self._path)  # noqa: PTH105  as everywhere else for atomic replacement
        finally:
            with contextlib.suppress(FileNotFoundError):
                staged.unlink()

    def _parse(self, data: bytes) -> rpb.ClusterView:
        body, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
        if chunk_digest(body) != digest:
            raise CorruptError(f"{self._path} does not match the digest at its end")
        view = rpb.ClusterView()
        try:
            view.ParseFromString(body)
            if view.cluster_id != self._cluster_id:
                raise ValueError(f"it is of cluster {view.cluster_id[:128]!r}")
            if len(view.nodes) > NODES_MAX:
                raise ValueError(f"it names {len(view.nodes)} nodes")
            for node in view.nodes:
                check_name("node_id", node.node_id)
                for address in (node.data_address, node.lane_address):
                    split_address(address)
        except (DecodeError, ValueError) as error:
            raise CorruptError(f"{self._path} is not valid: {error}") from None
        return view
