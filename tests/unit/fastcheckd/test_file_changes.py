"""Files that are replaced under a running daemon are noticed; what is only looked at is not."""

import os

from fastcheckd.certificates import signature


def test_a_change_of_any_file_is_noticed(tmp_path):
    cert, key = tmp_path / "cert", tmp_path / "key"
    cert.write_text("one")
    missing = signature(cert, key)
    key.write_text("two")
    first = signature(cert, key)
    assert first != missing
    key.read_text()
    assert signature(cert, key) == first

    # As an operator's tool does it: a new file takes the name, of the same size and even of the same age.
    fresh, old = tmp_path / "fresh", key.stat()
    fresh.write_text("TWO")
    os.utime(fresh, ns=(old.st_atime_ns, old.st_mtime_ns))
    fresh.replace(key)
    second = signature(cert, key)
    assert second != first

    cert.unlink()
    assert signature(cert, key) not in (first, second, missing)
