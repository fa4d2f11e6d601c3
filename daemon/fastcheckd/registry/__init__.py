"""The registry: which nodes live, which steps are committed. Three voters agree on it through Raft.

    state                      what is replicated, and its commands; pure, as are the next six
    nodes, sessions            nodes and what became of them; who speaks for a rank
    commits, holders           which steps are committed; who holds them, and how that may change
    records                    forms, checked field by field
    commands                   every command, made in one place; pure
    collector, loads           which step of a job may be committed next; who held what before; pure
    redundancy, repair_orders, what is short of copies, what to make next, who is waited for, whether
    repair_waits, safe_stop     a node may be stopped; pure
    raft                       consensus: pysyncobj made safe
    voter_changes,             another voter for one that is gone; what nodes remember of the voters
    known_voters
    wire, view                 between JSON and messages
    leader, arbiter, reports,  what a leader does: place, judge nodes, collect reports and commit,
    repairs, audit              have lost copies made anew, ask whether nodes hold what they should
    outward                    what a voter asks of nodes, other voters and holders
    stubs, client              everyone else's way to it

Only a committed command is authority. Whatever a leader believes beyond that is advice that the
state machine checks again.
"""
