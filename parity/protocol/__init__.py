"""What a call must not change."""
