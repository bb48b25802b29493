"""The state of a store: snapshots of runs, their history, and what needs attention."""
