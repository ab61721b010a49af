"""The errors that cross module boundaries; each names the thing, the value and the remedy."""


class UsageError(Exception):
    """The user asked for something that does not exist or cannot be read: one line, exit code 2."""


class Unsupported(Exception):
    """Raised by an adapter for a case that its implementation does not claim to handle; the message says what and why."""


class HarnessError(Exception):
    """The harness contradicts itself: a fault of ours, never a verdict on what it tests."""


class OracleError(FloatingPointError):
    """The harness's own definition or its replicas cannot be judged with: a fault of ours, never a skipped case."""
