"""Side by side with others: the same state, saved to memory and restored, by each library as its users do it.

`make bench-peers` runs it. The others are pinned in environments of their own, so that the dev environment has only
what FastCheck needs. Every candidate runs in a process of its own, bounded in time and memory; one that cannot be
installed, imported or run is in the table as "not run", with the reason. Nothing here imports a candidate's library
outside of that candidate's own module, and there only when it is made.
"""
