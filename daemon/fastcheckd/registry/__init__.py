"""The registry: which nodes live, which steps are committed. Three voters agree on it through Raft.

    state, commits, records    what is replicated, and the rules; pure
    collector                  which step of a job may be committed next; pure
    journal, sealing,          pysyncobj made safe: a log that survives crashes, authenticated
    unpickling, raft_transport  connections, no code in messages
    raft                       the engine behind `propose` and `read`
    wire, view                 between JSON and messages
    reporting, leading         what a leader does: collect reports, judge nodes
    server, client             the process, and everyone else's way to it

Only a committed command is authority. Whatever a leader believes beyond that is advice that the
state machine checks again.
"""
