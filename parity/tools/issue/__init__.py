"""What one pastes upstream: a Markdown issue with numbers, code paths, a stand-alone script and versions."""

from parity.tools.issue.standalone import script
from parity.tools.issue.text import issue_text

__all__ = ["issue_text", "script"]
