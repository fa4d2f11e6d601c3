"""Moving shards between nodes: the receiver pulls their chunks over the bulk lane."""
