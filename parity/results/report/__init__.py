"""Reports from rows: terminal, JUnit, Markdown, HTML.

Reads rows, and nothing else: whatever a report shows is in `results.ndjson`, so that a run from another machine, or one
that was killed, reports like any other. `rows` reads and writes the file, `summary.summarise` counts, the rest renders.
"""

PAGES = ("high", "medium", "low", "mended")
"""Pages of docs/ with what the ledger tells users."""
