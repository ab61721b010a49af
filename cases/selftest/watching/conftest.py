"""What tests of the watch share."""

import logging

import pytest

END = "watch: looked at step"


@pytest.fixture
def said():
    """What the watch says, line by line, but for its last; TRL is kept quiet at the handlers of others."""
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage()) if END not in record.getMessage() else None
    logger = logging.getLogger("parity.watch")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
