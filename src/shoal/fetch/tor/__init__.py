"""Pages through Tor: a daemon for each worker process, and a circuit of its own for each run and host."""
