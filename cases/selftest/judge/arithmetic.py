"""Functions under Monte Carlo arithmetic, for the tests of this room."""

from parity.judge.monte_carlo import MonteCarlo


def under(recipe, dtype, function, *tensors, seed=1):
    """function(*tensors) under Monte Carlo arithmetic."""
    with MonteCarlo(recipe, dtype, seed):
        return function(*tensors)
