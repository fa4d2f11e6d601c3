"""The bulk lane under TLS: mutual, version 1.3, each end the node that its certificate names.

A handshake has one deadline as a whole. How much may be sent in it is OpenSSL's bound: one message of each kind, a
chain of at most 100 KiB, and few empty records. Blocking sockets, as everywhere on the lane.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from typing import TypeAlias

from ..certificates import Certificates, named_node, reason
from ..errors import PeerError

#: What a mismatch of the two configurations looks like.
_HINT = "lane_tls must be the same on all nodes, their certificates of one authority"


#: Told of the new socket before the handshake, so that whoever wants the connection to end can end it.
Wrapped: TypeAlias = Callable[[socket.socket], None]


class LaneTls(Certificates):
    """This node's certificate, for its lanes."""

    def connect(self, sock: socket.socket, node_id: str, within_s: float, wrapped: Wrapped) -> ssl.SSLSocket:
        """Put a connected socket under TLS; `sock` itself is of no use any more once `wrapped` has the new one.

        Raises:
            PeerError: the other end is not `node_id`, speaks no TLS, or takes longer than the time.
        """
        protected, name = self._shake_hands(sock, within_s, wrapped, accepting=False)
        if name != node_id:
            protected.close()
            raise PeerError(f"the lane of node {node_id} is that of {name or 'nobody of this cluster'}")
        return protected

    def accept(self, sock: socket.socket, within_s: float, wrapped: Wrapped) -> tuple[ssl.SSLSocket, str]:
        """Likewise for one that was accepted; also the node that connected.

        Raises:
            PeerError: it shows no good certificate of a node of this cluster in time.
        """
        protected, name = self._shake_hands(sock, within_s, wrapped, accepting=True)
        if name is None:
            protected.close()
            raise PeerError("its certificate names no node of this cluster")
        return protected, name

    def _shake_hands(
        self, sock: socket.socket, within_s: float, wrapped: Wrapped, *, accepting: bool
    ) -> tuple[ssl.SSLSocket, str | None]:
        protected: socket.socket = sock
        try:
            # That of `Certificates`: TLS 1.3, and no other side without a certificate of the authority.
            context = self.context(accepting=accepting)
            protected = context.wrap_socket(sock, server_side=accepting, do_handshake_on_connect=False)
            wrapped(protected)
            protected.settimeout(within_s)  # for all of the handshake
            protected.do_handshake()
            return protected, named_node(protected.getpeercert(), self.cluster_id)
        except ssl.SSLError as error:
            protected.close()
            raise PeerError(f"no TLS on the lane: {reason(error)}; {_HINT}") from None
        except TimeoutError:
            protected.close()
            raise PeerError(f"no TLS on the lane within {within_s:g} s; {_HINT}") from None
        except OSError as error:
            protected.close()
            raise PeerError(f"no TLS on the lane: {error.strerror or error}; {_HINT}") from None
