"""The first step of a training run and the sampler's mismatch, watched in the run itself; torch, transformers and TRL alone."""
