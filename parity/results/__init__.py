"""Results of a run: rows, the ledger of known findings, reports."""
