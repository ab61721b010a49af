"""What tests the harness itself: honest controls, mutants, false alarms, sensitivity."""
