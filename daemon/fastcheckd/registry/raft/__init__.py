"""Consensus: pysyncobj made safe, behind `propose` and `read`. Nothing outside needs more than `consensus.Consensus`.

consensus                   what the rest of the registry needs of it
adapter, engine, membership the engine, with appends that delete only what differs and a membership that goes by
                             the log
transport, messages, tls     connections between voters: limits, authentication, no code in messages
journal, snapshots, disk,   files that survive crashes and power cuts, and whose they are
voter_folder
recovery                    one voter that is left goes on alone
"""

import _socket
import socket

import pysyncobj.tcp_connection  # noqa: F401  # whichever module here comes first, this is done after it

# pysyncobj puts a function in its place that works on Windows alone.
socket.inet_ntop = _socket.inet_ntop
