"""States that all ranks hold alike: each saves a part, all are compared, any number loads (docs/replicated.md).

parts      a layout and a number of ranks -> who keeps which chunks, what is compared   (pure)
sums       tensors -> 64 bits each, wherever they are
sharing    a state -> this rank's part of it, ready to be copied, and the errors of its saves
whole      the parts of all ranks in one segment -> a header whose places are right there
"""
