"""The registry: which nodes live, which steps are committed. Three voters agree on it through Raft.

    state                      what is replicated, and its commands; pure, as are the next six
    members, sessions          nodes and what became of them; who speaks for a rank
    commits, holding           which steps are committed; who holds them, and how that may change
    records                    forms, checked field by field
    commands                   every command, made in one place; pure
    collector, loads           which step of a job may be committed next; who held what before; pure
    redundancy, repair_orders, what is short of copies, what to make next, who is waited for, whether
    repair_waits, safe_stop     a node may be stopped; pure
    engine                     what the rest needs of a consensus engine
    disk, journal, snapshots,  pysyncobj made safe: files that survive crashes, authenticated
    voter_folder, sealed_json,  connections, no code in messages
    sealing, tls, unpickling,
    raft_transport
    raft, raft_engine,         the engine behind `propose` and `read`, with a membership that goes by
    membership                  the log
    replacing, remembered      another voter for one that is gone; what nodes remember of the voters
    wire, view                 between JSON and messages
    leading, judging,          what a leader does: place, judge nodes, collect reports and commit,
    reporting, foreman,         have lost copies made anew, ask whether nodes hold what they should
    auditing
    outward                    what a voter asks of nodes, other voters and holders
    stubs, client              everyone else's way to it

Only a committed command is authority. Whatever a leader believes beyond that is advice that the
state machine checks again.
"""
