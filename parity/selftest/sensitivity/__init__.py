"""Detection limit: the smallest relative error that one case, and a run, catches; beside fixed tolerances.

    python -m parity.selftest.sensitivity --cases 96

`measure` finds for each drawn case the size from which on an error is caught, `table` and `plot` show the distribution.
"""
