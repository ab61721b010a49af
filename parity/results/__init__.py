"""What a run leaves behind: rows, the ledger of known findings, reports."""
