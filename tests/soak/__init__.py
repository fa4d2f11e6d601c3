"""The soak: a job trains for as long as one likes while seeded faults fall; what was promised is accounted for."""
