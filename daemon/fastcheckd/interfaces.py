"""Which of this machine's network interfaces the bulk lane uses: found once, at the start, and said aloud.

A machine often has several networks, and the wrong one makes restores ten times slower without any error. So the
address can be chosen, a wrong choice is refused with a list of what there is, a slower choice than need be is told.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from .config import Config, is_loopback
from .errors import ConfigError

_SYSFS = Path("/sys/class/net")


@dataclass(frozen=True, kw_only=True)
class Interface:
    """One network interface as the system describes it."""

    name: str
    #: IPv4 first, then IPv6 without link-local ones.
    addresses: tuple[str, ...]
    #: 10^6 bits per second as the driver says; 0: it does not say.
    speed_mbit_per_s: int
    up: bool
    #: A card, or several bonded: its speed means something. Bridges and virtual pairs invent theirs.
    physical: bool = True

    def __str__(self) -> str:
        speed = f"{self.speed_mbit_per_s} Mbit/s" if self.speed_mbit_per_s else "speed unknown"
        return f"{self.name} ({', '.join(self.addresses) or 'no address'}; {speed}; {'up' if self.up else 'down'})"


def interfaces() -> list[Interface]:
    """What this machine has now."""
    stats = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        v4 = [e.address for e in entries if e.family == socket.AF_INET]
        v6 = [e.address for e in entries if e.family == socket.AF_INET6 and "%" not in e.address]
        status = stats.get(name)
        found.append(
            Interface(
                name=name,
                addresses=(*v4, *v6),
                # Some drivers say -1 or 65535 for "unknown".
                speed_mbit_per_s=status.speed if status is not None and 0 < status.speed < 2**31 else 0,
                up=status is not None and status.isup,
                physical=any((_SYSFS / name / mark).exists() for mark in ("device", "bonding")),
            )
        )
    return found


def with_lane_host(config: Config, present: Sequence[Interface]) -> Config:
    """The configuration with `lane_host` as an IP address of this machine; as it is when the key is not set.

    Raises:
        ConfigError: it is neither an address of this machine nor an interface that is up; names what there is.
    """
    if not config.lane_host:
        return config
    wanted = config.lane_host.strip("[]")
    named = next((i for i in present if i.name == wanted), None)
    if named is not None:
        if not named.up or not named.addresses:
            state = "has no address" if named.up else "is down"
            raise _refusal(config.lane_host, f"the interface {state}", present)
        return dataclasses.replace(config, lane_host=named.addresses[0])
    try:
        address = ipaddress.ip_address(wanted)
    except ValueError:
        raise _refusal(
            config.lane_host, "there is no such interface here, and it is no IP address", present
        ) from None
    if address.is_unspecified:
        raise _refusal(config.lane_host, "others could not be told where to connect", present)
    if not address.is_loopback and interface_of(str(address), present) is None:
        raise _refusal(config.lane_host, "the address is not of this machine", present)
    return dataclasses.replace(config, lane_host=str(address))


def _refusal(value: str, why: str, present: Sequence[Interface]) -> ConfigError:
    return ConfigError(
        f"config key 'lane_host' = {value!r}: {why}; this machine has: "
        + ("; ".join(map(str, present)) or "no interface")
    )


def interface_of(host: str, present: Sequence[Interface]) -> Interface | None:
    """The interface that has the address of `host` (an IP address or a name); None when none is known to."""
    try:
        addresses = {str(ipaddress.ip_address(host))}
    except ValueError:
        try:
            addresses = {
                str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            }
        except OSError:
            return None
    for interface in present:
        own = {str(ipaddress.ip_address(address)) for address in interface.addresses}
        if own & addresses or ("127.0.0.1" in own and any(map(is_loopback, addresses))):
            return interface
    return None


def faster_than(chosen: Interface | None, present: Sequence[Interface]) -> Interface | None:
    """A faster interface that is up and has an address, when both speeds are known and mean something."""
    if chosen is None or not chosen.physical or not chosen.speed_mbit_per_s:
        return None
    fit = [i for i in present if i.up and i.physical and i.addresses]
    best = max(fit, key=lambda i: i.speed_mbit_per_s, default=chosen)
    return best if best.speed_mbit_per_s > chosen.speed_mbit_per_s else None
