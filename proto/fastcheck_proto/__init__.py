"""The wire between trainers, daemons and operators.

`v1` holds the `.proto` files and the stubs generated from them (`make proto`; never edited).
`conventions` holds the few agreements that a `.proto` cannot state. This package is the only thing
that the SDK (`fastcheck`) and the daemon (`fastcheckd`) have in common.
"""
