"""The registry: which nodes live, which steps are committed. Three voters agree on it through Raft.

    state                      what is replicated, and its commands; pure, as are the next six
    members, sessions          nodes and what became of them; who speaks for a rank
    commits, holding           which steps are committed; who holds them, and how that may change
    records, migrating         forms, checked field by field; snapshots of earlier versions
    commands                   every command, made in one place; pure
    collector                  which step of a job may be committed next; pure
    engine                     what the rest needs of a consensus engine
    journal, sealing,          pysyncobj made safe: a log that survives crashes, authenticated
    unpickling, raft_transport  connections, no code in messages
    raft                       the engine behind `propose` and `read`
    wire, view                 between JSON and messages
    reporting, leading         what a leader does: collect reports, judge nodes
    stubs, client              everyone else's way to it

Only a committed command is authority. Whatever a leader believes beyond that is advice that the
state machine checks again.
"""
