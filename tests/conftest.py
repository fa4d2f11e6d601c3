"""Settings that hold for every test."""

from hypothesis import settings

# The machine may be shared and noisy: an input is wrong or right, never too slow.
settings.register_profile("fastcheck", deadline=None, print_blob=True)
settings.load_profile("fastcheck")
