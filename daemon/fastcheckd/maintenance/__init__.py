"""Keeps what is held: makes copies that the registry asks for, checks replicas, says what is here and what is lost."""
