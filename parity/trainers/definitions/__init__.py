"""What a training step computes, by definition, in float64."""
