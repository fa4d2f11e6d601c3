"""Benchmarks: what users do, next to the limit of the same machine in the same run.

`make bench` prints a table and writes JSON with the machine, the versions and every single run. Rounds
alternate between the limit and the candidate, so that both see the same weather.
"""
