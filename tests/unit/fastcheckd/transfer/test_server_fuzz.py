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
from lane_stand import CHUNK, DATA, read_all, standing
from tests.fuzzing import damaged, examples, unsigned

from fastcheckd.digests import chunk_digest
from fastcheckd.transfer.frames import FrameHeader, Hello, Kind, pack_frame, pack_hello, pack_want

CHUNKS = [DATA[at : at + CHUNK] for at in range(0, len(DATA), CHUNK)]
RIGHT = [
    pack_frame(
        FrameHeader(
            kind=Kind.DATA,
            chunk=index,
            raw_bytes=len(chunk),
            encoded_bytes=len(chunk),
            offset=index * CHUNK,
            digest=chunk_digest(chunk),
        )
    )
    + chunk
    for index, chunk in enumerate(CHUNKS)
] + [pack_frame(FrameHeader(kind=Kind.END, chunk=len(CHUNKS))), *map(b"".join, map(pack_want, ([0], [2, 1])))]
#: A writer that says this has said all that it was to say.
WHOLE = b"".join(RIGHT[: len(CHUNKS) + 1])


@st.composite
def any_header(draw: st.DrawFn) -> bytes:
    """A frame's header whose fields are anything, and whose checksum is right."""
    # What is refused at once is tried by `test_lane_frames.py`: most of these are to get further.
    fields = [draw(st.sampled_from([1] * 9 + [2])), draw(st.integers(0, 6)), draw(st.integers(0, 2))]
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
        st.lists(any_header() | st.sampled_from(RIGHT) | st.binary(max_size=200), min_size=1, max_size=6)
    )
    return b"".join(pieces)


def test_any_conversation_ends_and_the_next_one_is_served(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    whole = 0
    with standing(transfer_timeout_s=30.0) as stand:

        @examples(150)
        @given(
            who=st.sampled_from(["nobody", "reader", "reader on demand", "writer"]),
            hello=st.data(),
            words=conversations() | st.just(WHOLE).flatmap(damaged) | st.just(WHOLE),
        )
        def talk(who: str, hello: st.DataObject, words: bytes) -> None:
            nonlocal whole
            put = None
            if who == "writer":
                ticket, put = stand.put_ticket()
            else:
                ticket = bytes(32) if who == "nobody" else stand.ticket()
            greeting = pack_hello(Hello(first=0, stride=int(who != "reader on demand"), ticket=ticket))
            said = (hello.draw(damaged(greeting)) if who == "nobody" else greeting) + words
            with stand.connect() as sock, contextlib.suppress(OSError):
                sock.sendall(said)
                sock.shutdown(socket.SHUT_WR)
                read_all(sock)
            stand.is_idle()
            if put is not None:
                missing = put.incoming.missing(range(len(CHUNKS)))
                whole += not missing
                for index, chunk in enumerate(CHUNKS):
                    if index not in missing:
                        assert put.memory[index * CHUNK :][: len(chunk)] == chunk
                put.incoming.abandon()

        talk()
        stand.check_it_works()
    assert whole, "the right words were never listened to"
    assert not [record for record in caplog.records if record.exc_info]
