"""URLs as values: `normalize.py` writes, joins and fingerprints them, `scope.py` decides which of them a run may crawl.

The room does no I/O, and imports `config` and errors only. Start with the functions `written_url` and `resolve`.
"""
