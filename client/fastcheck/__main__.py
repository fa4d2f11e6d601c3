"""`python -m fastcheck` is `fastcheck`."""

from .cli.entry import main

main()
