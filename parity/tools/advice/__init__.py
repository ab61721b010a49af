"""`python -m parity.fixes check`: which known findings the settings of a training run meet, on the installed stack."""

from parity.tools.advice.advise import Advice, RelevantEntry, check

__all__ = ["Advice", "RelevantEntry", "check"]
