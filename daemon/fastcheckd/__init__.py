"""The FastCheck daemon: stages, replicates, commits and restores training state between nodes' RAM.

Packages and modules, from the pure to the busy; imports go upwards in this list only (checked by import-linter):

    errors, config, counters, digests, chunks   values and pure functions
    identity, rpc, dialer, certificates, log    small things that several processes need
    codec/                                      encoded chunks, both ways; what is worth encoding (pure)
    store/, placement/                          the RAM directory; where shards go (pure)
    health/, transfer/                          signs of life and verdicts (pure); the bulk lane
    registry/                                   consensus: a pure state machine and the shells around it
    view                                        the registry's view, followed, and kept for a restart
    save/, restore/, maintenance/               what a data process does for a trainer, and for what it holds
    observe/, services/                         metrics and HTTP; gRPC faces: translate and delegate, decide nothing
    process/                                    the parent and what it forks: agent, data, registry, each wired there
    main, launcher                              the command line; local clusters
"""

import os

# numpy comes with a BLAS that starts a thread for every core when it is imported, in each of our processes.
# Nothing here multiplies matrices. It must be said before the first import of numpy.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

__version__ = "0.2.0"
