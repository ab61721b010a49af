"""Functions under Monte Carlo arithmetic, for the tests of this room."""

from parity.judge.monte_carlo import MonteCarlo


def under(recipe, dtype, function, *tensors):
    """function(*tensors) under Monte Carlo arithmetic."""
    with MonteCarlo(recipe, dtype, 1):
        return function(*tensors)
