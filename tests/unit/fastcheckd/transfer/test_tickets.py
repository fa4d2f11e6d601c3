"""Tickets are good once, for a while, and for one thing."""

from __future__ import annotations

import contextlib

import pytest

from fastcheck_proto.v1 import peer_pb2
from fastcheckd.errors import FrameError, NotHeldError, PeerError
from fastcheckd.transfer.encoder_cache import ShardEncoder
from fastcheckd.transfer.tickets import Grant, TicketOffice


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def nothing() -> contextlib.AbstractContextManager[ShardEncoder]:
    raise NotHeldError("nobody opens it here")


def grant() -> Grant:
    return Grant(opened=nothing, purpose=peer_pb2.PURPOSE_RESTORE)


def test_a_ticket_is_good_once_and_for_its_own_grant() -> None:
    office = TicketOffice()
    one, other = grant(), grant()
    tickets = [office.issue(one), office.issue(other), office.issue(one)]
    assert len(set(tickets)) == 3
    assert all(len(t) == 32 for t in tickets)
    assert office.redeem(tickets[1]) is other
    assert office.redeem(tickets[0]) is one
    with pytest.raises(FrameError):
        office.redeem(tickets[0])
    with pytest.raises(FrameError):
        office.redeem(bytes(32))
    assert office.redeem(tickets[2]) is one


def test_a_ticket_dies_after_30_seconds() -> None:
    clock = Clock()
    office = TicketOffice(clock=clock)
    old = office.issue(grant())
    clock.now_s += 20
    young = office.issue(grant())
    clock.now_s += 10
    with pytest.raises(FrameError):
        office.redeem(old)
    office.redeem(young)


def test_revoking_a_grant_spares_the_others() -> None:
    office = TicketOffice()
    one, other = grant(), grant()
    tickets = [office.issue(one), office.issue(other), office.issue(one)]
    office.revoke(one)
    assert office.redeem(tickets[1]) is other
    for ticket in (tickets[0], tickets[2]):
        with pytest.raises(FrameError):
            office.redeem(ticket)


def test_there_are_only_so_many_and_time_makes_room() -> None:
    clock = Clock()
    office = TicketOffice(clock=clock, tickets_max=2)
    office.issue(grant())
    used = office.issue(grant())
    with pytest.raises(PeerError, match="too many"):
        office.issue(grant())
    office.redeem(used)
    office.issue(grant())
    clock.now_s += 31
    office.issue(grant())
    office.issue(grant())
