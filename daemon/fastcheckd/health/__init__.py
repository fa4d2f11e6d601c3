"""Who lives: heartbeats, probes, leases, and the verdicts drawn from them."""
