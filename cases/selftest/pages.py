"""What the slow tests measured, as Markdown: property of a test -> the function that makes a page of its rows."""

from cases.selftest.controls import soak
from cases.selftest.limits import limits
from cases.selftest.mutants import matrix

PAGES = {"mutants": matrix.page, "false alarms": soak.page, "limits": limits.page}
