"""The daemon's gRPC faces: thin, they translate between messages and the rooms that do the work."""
