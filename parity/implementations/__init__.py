"""Implementations: references and candidates, one file a library. How one is added: `parity.implementations.implementation`."""
