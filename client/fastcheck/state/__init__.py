"""A trainer's state as bytes, and back: trees of containers, values, tensors and objects.

    collect    state -> its tensors, and a header without places
    sources, steps, roles   optimizers in it, hyper-parameters of their steps, which tensors belong together
    layout, layouts   where each tensor goes, and keeping that from save to save
    flatten    state -> tensors with their places, header, layout           (what save needs)
    header     bytes -> checked StateHeader and values                      (trusts nothing it reads)
    places     records -> views and copies of tensors
    fill       header + segment -> the caller's state, in place            (what load needs)
    objects, modules, optimizers   what `fill` does with things that have load_state_dict
    paths, dtypes, dtensors, tensors   the words they share

Nothing here knows of daemons, files or gRPC: a segment is a flat uint8 tensor. No pickle anywhere.
"""
