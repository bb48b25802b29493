"""One module for each command, or for a few that belong together. ``shoal.cli.main`` says which is where."""
