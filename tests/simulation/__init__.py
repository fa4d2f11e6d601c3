"""A whole cluster in one process, in virtual time, from a seed: the daemon's own code, a modelled wire, faults.

    virtual_time    the event loop: time jumps, a process can be stopped or killed at any await
    network         messages between processes: delayed, lost, repeated, cut off
    machine         a node: its three processes, its memory, its clock
    agent, holder   what runs on it, around the real client, checks and view
    trainer         a job's ranks: they save and load
    faults          what goes wrong, and how much of it the guarantees still cover
    truth           what must hold, checked as it happens
    run             one seed from start to end
    planted         defects that must be found

Nothing here reads a wall clock, opens a socket or starts a thread.
"""
