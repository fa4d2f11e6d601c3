"""The registry: which nodes live, which steps are committed. Three voters agree on it through Raft.

    model                      the state in memory; pure, as are the next seven
    state                      applies commands to it, makes snapshots of it
    commands                   what each command must be, and how some are made
    nodes, sessions            nodes and what became of them; who speaks for a rank
    commits, deletion          which steps are committed; which are given up or deleted
    holders                    who holds them, and how that may change
    collector, loads           which step of a job may be committed next; who held what before; pure
    redundancy, repair_orders, what is short of copies, what to make next, who is waited for, whether
    repair_waits, safe_stop     a node may be stopped; pure
    raft                       consensus: pysyncobj made safe
    voter_changes,             another voter for one that is gone; what nodes remember of the voters
    known_voters
    view                       what a voter shows; pure
    leader, arbiter, reports,  what a leader does: place, judge nodes, collect reports and commit,
    repairs, audit              have lost copies made anew, ask whether nodes hold what they should
    outward                    what a voter asks of nodes, other voters and holders
    client                     everyone else's way to it

Only a committed command is authority. Whatever a leader believes beyond that is advice that the
state machine checks again.
"""
