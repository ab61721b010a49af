"""The judge: float64 oracle, replicas by random rounding, gates. It knows no loss and imports torch alone."""
