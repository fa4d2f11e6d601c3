"""The RAM store: replicas of shards as files in a tmpfs directory, owned by one data process.

`ram_store` is the door; nobody outside this room opens, makes or removes a file of the directory.
Nothing here knows peers, sessions or the registry. Calls block on the file system and on hashing:
an event loop sends them to a thread. The layout is in docs/protocol.md, "RAM directory".
"""
