"""Holds packets back for as long as they are told to: the delay that a kernel without netem cannot make.

`python -m tests.netlab.delaying INTERFACE ADDRESS=HARDWARE ...` takes frames that are sent to the interface, and sends
each on to the hardware address of the machine it is for, after the delay of its direction. Rules come as lines on
stdin, `FROM TO SECONDS`, and are repeated on stdout once they hold.
"""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import socket
import sys
import time

#: Ethernet header, then IPv4 with source and destination.
_SOURCE_IP, _DESTINATION_IP = slice(26, 30), slice(30, 34)
_FRAME_BYTES_MAX = 65_536
#: Frames held at most; what comes beyond is lost, as in a switch.
HELD_MAX = 20_000
_OUTGOING = 4


def main(interface: str, machines: list[str]) -> None:
    """Serve until stdin ends."""
    hardware = {
        socket.inet_aton(ip): bytes.fromhex(mac.replace(":", ""))
        for ip, mac in (machine.split("=") for machine in machines)
    }
    delays_s: dict[tuple[bytes, bytes], float] = {}
    held: list[tuple[float, int, bytes]] = []
    count = itertools.count()
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
    wire.bind((interface, 0))
    wire.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(wire, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        text = b""
        while True:
            timeout_s = max(0.0, held[0][0] - time.monotonic()) if held else None
            for key, _ in selector.select(timeout_s):
                if key.fileobj is wire:
                    frame, address = wire.recvfrom(_FRAME_BYTES_MAX)
                    way = frame[_SOURCE_IP], frame[_DESTINATION_IP]
                    if address[2] != _OUTGOING and way in delays_s and len(held) < HELD_MAX:
                        frame = hardware[way[1]] + frame[6:]
                        heapq.heappush(held, (time.monotonic() + delays_s[way], next(count), frame))
                else:
                    more = os.read(0, 4096)
                    if not more:
                        return
                    *rules, text = (text + more).split(b"\n")
                    for rule in rules:
                        sender, receiver, delay_s = rule.decode().split()
                        delays_s[(socket.inet_aton(sender), socket.inet_aton(receiver))] = float(delay_s)
                        print(rule.decode(), flush=True)
            while held and held[0][0] <= time.monotonic():
                wire.send(heapq.heappop(held)[2])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
