"""Lossless (and, on request, lossy) coding of a chunk against the same chunk of an earlier step. Pure.

How and why: docs/concepts.md and docs/formats.md. In this package: bytes in, bytes out, no I/O, no threads, no clock.
The caller decides how many chunks at once; everything here releases the GIL where it matters.
"""
