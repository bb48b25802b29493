"""Searches for inputs that cost too much: `bench/fuzz`."""
