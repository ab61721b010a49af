"""The state of the process that all parties share: taken before a call, put back after it, and who left it changed."""

from parity.world.snapshot import Snapshot, abandon, belongs, broken, importing, its_own, take, together, without

__all__ = ["Snapshot", "abandon", "belongs", "broken", "importing", "its_own", "take", "together", "without"]
