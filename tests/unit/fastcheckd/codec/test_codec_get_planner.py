"""Whether what is read is worth encoding: the slower of link and codec threads decides."""

from __future__ import annotations

import pytest
from fastcheckd.codec.get_planner import GetPlanner

CHUNK = 4 << 20
#: Of a thread.
ENCODES_BYTES_PER_S = 0.8e9


def settled(link_bytes_per_s: float, *, threads: int = 1, connections: int = 1, ratio: float = 1.2) -> bool:
    """What is chosen for most chunks, after some."""
    planner = GetPlanner("auto", threads)
    for _ in range(connections):
        planner.begin()
    chosen = []
    for _ in range(64):
        encode = planner.choose()
        chosen.append(encode)
        if encode:
            planner.encoded(CHUNK, int(CHUNK / ratio), CHUNK / ENCODES_BYTES_PER_S)
        size = int(CHUNK / ratio) if encode else CHUNK
        planner.sent(size, size * connections / link_bytes_per_s)
    return sum(chosen[8:]) > 28


@pytest.mark.parametrize(
    ("link_bytes_per_s", "encodes"), [(119e6, True), (299e6, True), (1.2e9, False), (5e9, False)]
)
def test_slow_links_are_spared_and_fast_ones_left_alone(link_bytes_per_s: float, encodes: bool):
    assert settled(link_bytes_per_s) is encodes


def test_connections_share_the_link_as_they_share_the_threads():
    assert settled(299e6, connections=4)
    assert not settled(1.2e9, connections=4)
    assert settled(1.2e9, connections=4, threads=4)


def test_what_hardly_shrinks_is_not_worth_the_cores():
    assert not settled(119e6, ratio=1.05)


def test_the_first_chunk_goes_raw_and_the_next_one_is_a_trial():
    planner = GetPlanner("auto", 1)
    assert not planner.choose()
    planner.sent(CHUNK, 1e-3)
    assert planner.choose()


def test_raw_is_not_for_ever():
    planner = GetPlanner("auto", 1)
    planner.sent(CHUNK, CHUNK / 5e9)
    planner.encoded(CHUNK, CHUNK // 2, CHUNK / ENCODES_BYTES_PER_S)
    assert 1 <= sum(planner.choose() for _ in range(128)) <= 3


@pytest.mark.parametrize(("policy", "encodes"), [("always", True), ("never", False)])
def test_other_policies_ask_nobody(policy: str, encodes: bool):
    planner = GetPlanner(policy, 1)
    assert planner.choose() is encodes
