"""Oracle and replicas: the definition run exactly, and with random rounding (Monte Carlo arithmetic)."""
