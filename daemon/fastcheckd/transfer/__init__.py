"""Moving one shard between two nodes: the bulk lane, and the put and get of a shard over it."""
