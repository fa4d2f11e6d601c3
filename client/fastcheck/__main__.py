"""`python -m fastcheck` is `fastcheck`."""

from .cli import main

main()
