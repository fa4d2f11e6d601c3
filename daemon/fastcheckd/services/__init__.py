"""The gRPC faces: check what comes in, delegate, translate errors. They decide nothing."""
