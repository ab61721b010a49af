"""A whole run: shards, worker processes and their supervisor, one call, one replay."""
