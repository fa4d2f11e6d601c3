"""gRPC faces: they check what came over the wire, translate, delegate, and decide nothing."""
