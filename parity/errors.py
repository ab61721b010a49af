"""The errors that cross module boundaries; each names the thing, the value and the remedy. And the exit codes."""

import re

AGREE, NEW, USAGE, NOTHING, STALE, FAULT, NO_JUDGEMENT = 0, 1, 2, 3, 4, 70, 125
INTERRUPTED, UNREAD, TERMINATED = 130, 141, 143
"""Exit codes. FAULT (EX_SOFTWARE of sysexits.h): an error of the harness, which says nothing about any loss. `replay` answers
NO_JUDGEMENT for USAGE, NOTHING and FAULT: it is what `git bisect run` skips."""


class UsageError(Exception):
    """The user asked for something that does not exist or cannot be read: one line, exit code 2. A word of more than
    500 characters, as damaged files have them, is cut."""

    def __init__(self, message: str):
        super().__init__(re.sub(r"\S{500,}", lambda word: f"{word[0][:80]}…", message))


class Unsupported(Exception):
    """Raised by an adapter for a case that its implementation does not claim to handle; the message says what and why."""


class HarnessError(Exception):
    """The harness contradicts itself: a fault of ours, never a verdict on what it tests."""


class OracleError(FloatingPointError):
    """The harness's own definition or its replicas cannot be judged with: a fault of ours, never a skipped case."""


class Returned(Exception):
    """What an implementation returned is no output of its family: a verdict about it."""
