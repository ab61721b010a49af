"""Tests of the harness itself: correct controls, wrong mutants, false alarms, sensitivity."""
