"""URLs as values: their normal form, which links belong to a crawl, and the names of hosts.

This room does no I/O, and may import `config` and what is below it. Start with `normalize.normalize_url`.
"""
