"""What honest rounding costs: Monte Carlo arithmetic, and oracles run exactly and as replicas."""
