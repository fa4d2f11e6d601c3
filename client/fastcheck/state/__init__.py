"""A trainer's state as bytes, and back: trees of containers, values, tensors and objects.

Saving goes from the state to what is copied:

    collect                      state -> its tensors, and a header without places
    optimizers, optimizer_steps  the optimizers in it, and the hyper-parameters of their steps
    tensor_groups                which tensors belong together
    layout, layouts              where each tensor goes; what is kept from save to save
    flatten                      all of these: tensors with their places, header, layout

Loading goes from bytes to the state:

    header                       bytes -> checked StateHeader and values (trusts nothing it reads)
    records                      records -> byte ranges, views and copies of tensors
    fill                         header and segment -> the caller's state, in place
    fill_objects, fill_optimizer what `fill` does with modules, optimizers, and other objects
    match                        the same walk, where DTensors were laid out differently

`tensors` and `sharding` describe single tensors. Nothing here knows of daemons, files or gRPC: a segment is a
flat uint8 tensor. No pickle anywhere.
"""
