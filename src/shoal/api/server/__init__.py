"""Shoal over HTTP: batches, runs, hosts and clusters."""
