"""The replica store: replicas as lists of immutable chunks, in files of a tmpfs directory that one data process owns.

`store` is the door; nobody outside opens, makes or removes a file of the directory. Nothing here knows peers,
sessions or the registry. Calls block on the file system and on hashing: an event loop sends them to a thread. The
design is docs/decisions/0007-chunk-store.md.
"""
