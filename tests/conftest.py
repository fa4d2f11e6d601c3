"""Settings that hold for every test."""

import os

from hypothesis import settings

# Threads of torch wait for each other by spinning. Here ranks are threads and processes that share the cores with
# whole clusters, and what spins takes them from whoever has work. `torchrun` says the same to more than one rank.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The machine may be shared and noisy: an input is wrong or right, never too slow.
settings.register_profile("fastcheck", deadline=None, print_blob=True)
settings.load_profile("fastcheck")
