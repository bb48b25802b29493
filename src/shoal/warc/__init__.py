"""WARC files: what was sent and received for each page, for archives and other tools."""
