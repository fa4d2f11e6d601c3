"""From a trainer's bytes to a committed step: reserve, seal, replicate, report."""
