"""Detection limits: the smallest relative error that one case, or a run, catches; the same for fixed tolerances.

    python -m parity.selftest.sensitivity --cases 96

`measure` finds for each drawn case the size from which on an error is caught, `table` and `plot` show the distribution.
"""
