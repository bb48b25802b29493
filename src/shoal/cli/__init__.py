"""The `shoal` command: parsing and printing only.

``main`` lists the commands by group and names the module of each; these modules are in ``commands``. ``help`` lays
out help texts and suggests names, ``options`` has the options that commands share, and ``run_store`` finds a spider
by its name and opens the run that a command is about. ``progress`` and ``summary`` show a crawl.

This room is the highest: it may import all others. Start with `main`.
"""
