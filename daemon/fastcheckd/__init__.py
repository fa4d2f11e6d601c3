"""The FastCheck daemon: stages, replicates, commits and restores training state between nodes' RAM.

Rooms, from the pure to the busy; imports go upwards in this list only (checked by import-linter):

    errors, config, counters, digests      values and pure functions
    identity, rpc, supervise, log          small things that several processes need
    store/, placement                      the RAM directory; where shards go (pure)
    health/, transfer/                     signs of life and verdicts (pure); the bulk lane
    registry/                              consensus: a pure state machine and the shells around it
    view                                   the registry's view, followed
    saving/, restore/                      what a data process does for a trainer
    services/                              gRPC faces: translate and delegate, decide nothing
    agent, registry_server                 one process each
    node, main                             wiring; the command line
"""

__version__ = "0.1.0"
