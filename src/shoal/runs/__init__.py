"""Runs: each has a run_id, is started once, and is crawled by any number of processes.

`crawl` is a run of one process, `worker` a part of a fleet, `processes` several on one machine, `cluster` nodes that
replace each other. All of them are a `lifecycle`. This room may import `crawling` and what is below it. Start with
`lifecycle`.
"""

from __future__ import annotations
