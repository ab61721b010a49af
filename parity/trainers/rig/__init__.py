"""What drives a real trainer: tiny models, releases of TRL, recorders, servers, processes."""
