"""Real rollouts: recorded from an engine, judged against the trainer's own log-probs, and live inside TRL's trainer."""
