"""Who lives: heartbeats and probes, and the verdicts drawn from them."""
