"""Wires the rooms into the three processes of a node, a module for each, which loads what that one needs."""
