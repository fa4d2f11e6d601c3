"""The FastCheck daemon: stages, replicates, commits and restores training state between nodes' RAM.

Rooms, from the pure to the busy; imports go upwards in this list only (checked by import-linter):

    errors, config, digests, placement     values and pure functions
    registry/state, health/detector,       pure deciders: (state, event, now) -> decision
    restore/plan, transfer/frames
    store/, transfer/, registry/, health/  thin shells around one kind of I/O each
    saving/, restore/                      what a data process does for a trainer
    services/                              gRPC faces: translate and delegate, decide nothing
    node                                   wires the above into the agent, data and registry processes
"""

__version__ = "0.1.0"
