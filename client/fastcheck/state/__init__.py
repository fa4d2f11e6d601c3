"""A trainer's state as bytes, and back: trees of containers, values, tensors and objects.

    flatten    state -> tensors with their places, and the header          (what save needs)
    header     bytes -> checked StateHeader, values and tensor views       (trusts nothing it reads)
    fill       header + segment -> the caller's state, in place            (what load needs)
    objects, modules, optimizers   what `fill` does with things that have load_state_dict
    paths, dtypes, dtensors, tensors   the words they share

Nothing here knows of daemons, files or gRPC: a segment is a flat uint8 tensor. No pickle anywhere.
"""
