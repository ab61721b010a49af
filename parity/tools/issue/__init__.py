"""A bug report for upstream: Markdown with numbers, code paths, a stand-alone script and versions."""

from parity.tools.issue.standalone import script
from parity.tools.issue.text import issue_text

__all__ = ["issue_text", "script"]
