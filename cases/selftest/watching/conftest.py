"""What tests of the watch share."""

import logging

import pytest


@pytest.fixture
def said():
    """What the watch says, line by line; TRL is kept quiet at the handlers of others."""
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("parity.watch")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
