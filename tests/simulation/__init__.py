"""A whole cluster in one process, in virtual time, from a seed: the daemon's own code, a modelled wire, faults.

    virtual_time    the event loop: time jumps, a process can be stopped or killed at any await
    network, stubs  messages between processes: delayed, lost, repeated, cut off
    machine         a node: its three processes, its memory, its clock
    voter           a registry process: the real engine, pysyncobj and all, on
    sockets, disk   virtual TCP and a disk that is full, slow, torn or without power
    agent, data     what runs on it, around the real client, checks, view, lease and inventory
    saving          a save and a load on their way
    training        a job's ranks
    faults          what goes wrong, and how much of it the guarantees still cover
    truth           what must hold, checked as it happens
    consensus       Raft's own properties, at every change of a log
    deciding        whether something is decided while a majority of the voters is well
    run, many       one seed from start to end; many on a few processes
    planted         defects that must be found

Nothing here reads a wall clock, opens a socket or starts a thread.
"""
