"""What a node shows of itself to those who watch: metrics, and whether it lives, is ready, may be stopped.

Counters and durations are counted where things happen; here they are only read, when somebody asks, and written down
in Prometheus' words (docs/operations.md). `http_edge` and `scrape` do I/O, the rest is pure.
"""
