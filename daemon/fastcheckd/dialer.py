"""gRPC between nodes: channels that lead to one node and nobody else, and ports that only certificates open.

With the `tls_*` keys, both ends are mutual TLS (see `certificates.py`): a channel goes on only with the node that
it was made for. Without them both are plaintext. What a caller may do is decided by `services.roles`.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import grpc
import grpc.aio

from .certificates import Certificates, node_dns
from .config import Config
from .rpc import CHANNEL_OPTIONS

#: How often the files are looked at, at most: a call must not cost three system calls.
_LOOK_S = 1.0
_CLOSE_GRACE_S = 1.0
#: How long a channel with an old certificate, or one too many, is still good for who has it, and then for its calls.
_RETIRED_S = 60.0
_CHANNELS_MAX = 256

Options = Sequence[tuple[str, int | str]]


class Dialer:
    """Makes channels to nodes and opens ports, all with this node's certificate, if it has one.

    Args:
        certificates: None: everything is plaintext.
    """

    def __init__(self, certificates: Certificates | None = None) -> None:
        self._certificates = certificates
        self._looked_at = 0.0

    @classmethod
    def of(cls, config: Config) -> Dialer:
        """With the certificate that a config names.

        Raises:
            ConfigError: a file that the operator has to look at.
        """
        return cls(Certificates(config) if config.tls_cert_file else None)

    @property
    def certificates(self) -> Certificates | None:
        """This node's certificate; None: plaintext."""
        return self._certificates

    @property
    def generation(self) -> int:
        """Grows when the files have changed: channels that were made before it show the old certificate."""
        if self._certificates is None:
            return 0
        if (now := time.monotonic()) - self._looked_at >= _LOOK_S:
            self._looked_at = now
            self._certificates.refresh()
        return self._certificates.newest.generation

    def channel(self, node_id: str, address: str, options: Options = CHANNEL_OPTIONS) -> grpc.aio.Channel:
        """A channel to that node at that address. Calls on it fail as UNAVAILABLE when somebody else is there."""
        if self._certificates is None:
            return grpc.aio.insecure_channel(address, options=options)
        files = self._certificates.newest
        credentials = grpc.ssl_channel_credentials(files.ca, files.key, files.cert)
        name = node_dns(self._certificates.cluster_id, node_id)
        # gRPC compares names of hosts only, and an address of a host may be many nodes' or another one's tomorrow.
        return grpc.aio.secure_channel(
            address, credentials, options=[*options, ("grpc.ssl_target_name_override", name)]
        )

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Have a server listen on host:port; returns the port.

        Raises:
            RuntimeError: it is taken, or not of this machine.
        """
        if (certificates := self._certificates) is None:
            return server.add_insecure_port(address)
        given = certificates.newest

        def newest() -> grpc.ServerCertificateConfiguration | None:
            # Asked at each handshake, in a thread of gRPC's.
            nonlocal given
            certificates.refresh()
            if certificates.newest is given:
                return None
            given = certificates.newest
            return given.for_servers()

        credentials = grpc.dynamic_ssl_server_credentials(
            given.for_servers(),
            newest,  # type: ignore[arg-type]  # None, as documented: nothing has changed
            require_client_authentication=True,
        )
        return server.add_secure_port(address, credentials)


class _Kept(NamedTuple):
    generation: int
    channel: grpc.aio.Channel


class Channels:
    """One channel for each node and address, kept between calls and made anew under a new certificate.

    Used on one event loop. The least recently used goes first when there are too many.
    """

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        self._retired: dict[asyncio.Task[None], grpc.aio.Channel] = {}

    def to(self, node_id: str, address: str) -> grpc.aio.Channel:
        """The channel to that node at that address."""
        key, generation = (node_id, address), self._dialer.generation
        if key in self._kept and self._kept[key].generation != generation:
            self._retire(self._kept.pop(key).channel)
        if key not in self._kept:
            self._kept[key] = _Kept(generation, self._dialer.channel(node_id, address))
            if len(self._kept) > _CHANNELS_MAX:
                self._retire(self._kept.popitem(last=False)[1].channel)
        self._kept.move_to_end(key)
        return self._kept[key].channel

    def _retire(self, channel: grpc.aio.Channel) -> None:
        task = asyncio.get_running_loop().create_task(_close_in_time(channel))
        self._retired[task] = channel
        task.add_done_callback(lambda done: self._retired.pop(done, None))

    async def close(self, grace_s: float = _CLOSE_GRACE_S) -> None:
        """Close all channels."""
        channels = [*self._retired.values(), *(each.channel for each in self._kept.values())]
        for task in list(self._retired):
            task.cancel()
        self._retired.clear()
        self._kept.clear()
        await asyncio.gather(*(channel.close(grace_s) for channel in channels))


async def _close_in_time(channel: grpc.aio.Channel) -> None:
    """Whoever took the channel for a transfer goes on calling on it for a while; a stream on it may never end."""
    await asyncio.sleep(_RETIRED_S)
    await channel.close(_RETIRED_S)
