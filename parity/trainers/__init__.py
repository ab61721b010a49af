"""Checks of whole trainers: `catalogue` lists them, `checks/` has one module each, `rig/` drives TRL, `definitions/` judges."""
