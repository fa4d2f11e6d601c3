"""Worker processes that encode and decode chunks for the data process (docs/workers.md)."""
