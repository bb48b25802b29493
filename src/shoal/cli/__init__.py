"""The command line: parsing and printing only. What it does is done by the modules that a program would use."""
