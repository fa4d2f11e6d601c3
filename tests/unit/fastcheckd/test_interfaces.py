"""The lane's network: chosen by address or name, refused with a list when it is wrong, told when another is faster."""

from __future__ import annotations

import pytest

from fastcheckd.config import Config, Voter
from fastcheckd.errors import ConfigError
from fastcheckd.interfaces import Interface, faster_than, interface_of, interfaces, with_lane_host

LO = Interface(name="lo", addresses=("127.0.0.1", "::1"), speed_mbit_per_s=0, up=True, physical=False)
SLOW = Interface(name="eth0", addresses=("10.1.0.4", "fd00::4"), speed_mbit_per_s=1000, up=True)
FAST = Interface(name="eth1", addresses=("10.2.0.4",), speed_mbit_per_s=25000, up=True)
OFF = Interface(name="eth2", addresses=("10.3.0.4",), speed_mbit_per_s=100000, up=False)
MUTE = Interface(name="eth3", addresses=("10.4.0.4",), speed_mbit_per_s=0, up=True)
BARE = Interface(name="eth4", addresses=(), speed_mbit_per_s=100000, up=True)
BRIDGE = Interface(name="br0", addresses=("172.17.0.1",), speed_mbit_per_s=200000, up=True, physical=False)
#: Without them a node off loopback is a voter that needs a key.
ELSEWHERE = (Voter(node_id="other", registry_address="10.1.0.5:1", raft_address="10.1.0.5:2"),)
ALL = [LO, SLOW, FAST, OFF, MUTE, BARE, BRIDGE]


@pytest.mark.parametrize(
    ("wanted", "address"),
    [
        ("", "10.1.0.4:7452"),
        ("eth1", "10.2.0.4:7452"),
        ("10.2.0.4", "10.2.0.4:7452"),
        ("fd00:0::4", "[fd00::4]:7452"),
        ("127.0.0.9", "127.0.0.9:7452"),
    ],
)
def test_an_interface_or_an_address_becomes_what_peers_are_told(wanted: str, address: str) -> None:
    config = with_lane_host(Config(host="10.1.0.4", voters=ELSEWHERE, lane_host=wanted), ALL)
    assert config.lane_address == address
    assert config.data_address == "10.1.0.4:7451"
    assert with_lane_host(config, ALL) == config, "a child resolves what its parent has resolved"


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ("10.9.9.9", "not of this machine"),
        ("eth2", "is down"),
        ("eth4", "has no address"),
        ("ib0", "no such interface"),
        ("0.0.0.0", "where to connect"),
    ],
)
def test_a_wrong_choice_is_refused_with_all_that_there_is(wanted: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        with_lane_host(Config(lane_host=wanted), ALL)
    assert "lane_host" in str(caught.value)
    assert "eth1 (10.2.0.4; 25000 Mbit/s; up)" in str(caught.value)
    assert "eth3 (10.4.0.4; speed unknown; up)" in str(caught.value)


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("10.2.0.4", ALL) == FAST
    assert interface_of("FD00:0:0::4", ALL) == SLOW
    assert interface_of("localhost", ALL) == LO
    assert interface_of("127.0.0.9", ALL) == LO
    assert interface_of("10.9.9.9", ALL) is None


def test_only_a_known_real_and_usable_faster_interface_is_worth_a_word() -> None:
    assert faster_than(SLOW, ALL) == FAST
    assert faster_than(FAST, ALL) is None
    for unknown in (None, MUTE, LO, BRIDGE):
        assert faster_than(unknown, ALL) is None


def test_this_machines_own_interfaces_can_be_read() -> None:
    found = interfaces()
    assert "127.0.0.1" in next(i for i in found if i.name == "lo").addresses
    assert with_lane_host(Config(lane_host="lo"), found).lane_address == "127.0.0.1:7452"
