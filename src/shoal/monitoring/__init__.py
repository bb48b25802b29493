"""What is going on in a store: snapshots of runs, their history, and what needs attention."""
