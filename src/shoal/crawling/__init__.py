"""One crawl in one process: the loop, the life of a page, its queue, the seeder.

This room may import `sinks` and what is below it, and knows no command and no server. Start with `engine`, which
reads from top to bottom, then `page`.
"""
