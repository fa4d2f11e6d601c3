"""The `fastcheck` command: the admin questions, a cluster on this machine, and the demo."""
