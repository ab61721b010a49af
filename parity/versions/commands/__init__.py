"""The commands about versions."""
