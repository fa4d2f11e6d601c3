"""The parent that forks the processes of a node, and the composition root of each of them."""
