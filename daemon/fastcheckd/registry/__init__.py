"""The registry: which nodes live, which steps are committed. Three voters agree on it through Raft.

    model                      the state in memory, and whose a job is; pure, as are the next seven
    state                      applies commands to it, makes snapshots of it
    commands                   what each command must be, and how some are made
    nodes, sessions            nodes and what became of them; who speaks for a rank
    commits, deletion          which steps are committed; which are given up or deleted
    holders                    who holds them, and how that may change
    collector, loads           which step of a job may be committed next; who held what before; pure
    redundancy, repair_planner what is short of copies, and whether a node may be stopped; what to make next; pure
    raft                       consensus: pysyncobj made safe
    voters, known_voters       another voter for one that is gone, a newer schema; what nodes remember of the voters
    view                       what a voter shows; pure
    leader, arbiter, reports,  what a leader does: place, judge nodes, collect reports and commit,
    repairs, audit              have lost copies made anew, ask whether nodes hold what they should
    outward                    what a voter asks of nodes, other voters and holders
    client                     everyone else's way to it

Only a committed command is authority. Whatever a leader believes beyond that is advice that the
state machine checks again.
"""
