"""Whatever comes over a lane, with and without a ticket: the server ends it, and goes on with the next one."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from lane_stand import DATA, END, read_all, standing, want
from tests.fuzzing import damaged, examples, unsigned

from fastcheckd.transfer.frames import FRAME_BYTES, Hello, pack_hello

WORDS = [want(0), want(2, 1), want(0, 1, 2), END]
#: A reader that says this has all.
WHOLE = want(0, 1) + want(2) + END


@st.composite
def any_header(draw: st.DrawFn) -> bytes:
    """A frame's header whose fields are anything, and whose checksum is right."""
    # What is refused at once is tried by `test_frames.py`: most of these are to get further.
    fields = [draw(st.sampled_from([1] * 9 + [2])), draw(st.integers(0, 5)), draw(st.integers(0, 2))]
    fields += [draw(st.sampled_from([0] * 9 + [255])), *(draw(unsigned(32)) for _ in range(3))]
    body = struct.pack(
        "<4sBBBBIIIIQ16sQ",
        b"FCFR",
        *fields,
        0,
        draw(unsigned(64)),
        draw(st.binary(min_size=16, max_size=16)),
        0,
    )
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


@st.composite
def conversations(draw: st.DrawFn) -> bytes:
    """What may follow a hello."""
    pieces = draw(
        st.lists(any_header() | st.sampled_from(WORDS) | st.binary(max_size=200), min_size=1, max_size=6)
    )
    return b"".join(pieces)


def test_any_conversation_ends_and_the_next_one_is_served(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    whole = 0
    with standing(transfer_timeout_s=30.0) as stand:

        @examples(150)
        @given(
            knows_it=st.booleans(),
            hello=st.data(),
            words=conversations() | st.just(WHOLE).flatmap(damaged) | st.just(WHOLE),
        )
        def talk(knows_it: bool, hello: st.DataObject, words: bytes) -> None:
            nonlocal whole
            greeting = pack_hello(Hello(stand.ticket() if knows_it else bytes(32)))
            said = (greeting if knows_it else hello.draw(damaged(greeting))) + words
            answer = b""
            with stand.connect() as sock, contextlib.suppress(OSError):
                sock.sendall(said)
                sock.shutdown(socket.SHUT_WR)
                answer = read_all(sock)
            stand.is_idle()
            assert knows_it or not answer
            whole += len(answer) == len(DATA) + 3 * FRAME_BYTES

        talk()
        stand.check_it_works()
    assert whole, "the right words were never listened to"
    assert not [record for record in caplog.records if record.exc_info]
