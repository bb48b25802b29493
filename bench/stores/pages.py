"""The results of shared frontiers, clusters and the API as sections of a page, with explanations."""

from __future__ import annotations

import textwrap
from pathlib import Path

from batches import tables as batches
from crawl import chart, table
from nodes import tables as nodes
from stores import tables

NAMES = {"redis": "Redis", "postgresql": "PostgreSQL", "zookeeper": "ZooKeeper"}


def queue(results: table.Results) -> str:
    return section(
        "## The queue alone",
        f"""`bench/queue`: one client process on one core, the server on another, medians of {results["rounds"]} rounds.
        Half of the pushed URLs are known. Each lease is completed in the next call, without items or links. "Four
        callers" are concurrent tasks of the client. URLs have 60 characters and are on 100 hosts, as in a broad crawl,
        or on one host.""",
        table.markdown(tables.queue(results), left=(0,)),
        """pgqueuer, on the same PostgreSQL in the same run. The drain is its own benchmark (`tools/benchmark.py`,
        strategy drain, an entrypoint that does nothing) with the best of several numbers of consumers and batch sizes.
        The pushes are its `enqueue` with the same URLs, and the URL as `dedupe_key`. pgqueuer has no hosts, and forgets
        a key when its job is done. `balanced` and `volatile` give up durability for speed.""",
        table.markdown(tables.peers(results), left=(0, 5)),
        tables.disturbed(results["figures"]),
        conditions(results),
    )


def fleet(results: table.Results, out: Path) -> str:
    """Writes one chart per site to ``out``."""
    parts = [
        "## A crawl on a shared frontier",
        f"""`bench/fleet`: the sites and the spider from above, with the frontier on a server; medians of
        {results["rounds"]} rounds of {results["pages"]:,} pages, {results["concurrency"]} concurrent requests in each
        worker. A single worker has one core; nginx and the database share another. Two workers have one core each;
        {two_workers(results)}. Unless the notes say otherwise, each page was fetched once (by nginx's log) and written
        once, and the counters of the run balance.""",
    ]
    for key, title in results["sites"].items():
        subtitle = f"pages/s, {results['pages']:,} pages, concurrency {results['concurrency']}; peak memory of a worker"
        (out / f"fleet-{key}.svg").write_text(chart.svg(tables.fleet_rows(results, key), title, subtitle))
        picture = f"![Pages per second on a shared frontier: {title}](figures/fleet-{key}.svg)"
        parts += [f"### {title}, on a server", picture, table.markdown(tables.fleet(results, key), left=(0, 9))]
    return section(*parts, conditions(results))


def two_workers(results: table.Results) -> str:
    several = [run["cores"] for run in results["runs"] if len(run["cores"]["workers"]) > 1]
    if several and set(several[0]["site and store"]) & set(several[0]["workers"]):
        return "this machine has no more cores, so nginx and the database share them with the workers"
    return "nginx and the database share a third one"


def growth(results: table.Results) -> str:
    return section(
        "## How a shared frontier grows",
        f"""`bench/fleet-growth`: one client fills an empty server with URLs of 60 characters on {results["hosts"]}
        hosts. At each size it pushes a sample in batches of {tables.PUSHED} (half of the URLs are known, and come from
        all over the frontier). Then it leases and completes a sample in batches of {tables.WORKED}. Times are
        wall-clock times, including the round trip.""",
        table.markdown(tables.growth(results["figures"], results["labels"]), left=(0,)),
        tables.disturbed([figure[act] for figure in results["figures"] for act in ("push", "work")]),
        conditions(results),
    )


def cluster(results: table.Results) -> str:
    return section(
        "## Clusters",
        """`bench/cluster`: the nodes are processes, forked from one that has imported everything. They share the cores
        with the servers and the site. A Runner is killed with SIGKILL at a random moment between two heartbeats, and a
        Backup Runner takes over. "Lost" is when the coordinator notices the loss. "First page" is when the first
        request of the new Runner arrives at the site. Times are median and (worst).""",
        table.markdown(nodes.takeovers(results), left=(0,)),
        f"""An idle cluster with the default session: its run is paused, so no node crawls. "Complete after" is the time
        from the first fork until all nodes are members and every slot is held. CPU time is that of the next
        {nodes.seconds(results)} seconds, in percent of one core. "Its share" divides memory that nodes share among
        them.""",
        table.markdown(nodes.idle(results), left=(0,)),
        nodes.disturbed(results["figures"]),
        conditions(results),
    )


def batch(results: table.Results) -> str:
    rates, small, sessions = (
        table.markdown(lines, left=(0, len(lines[0]) - 1))
        for lines in (batches.rates(results), batches.small(results), batches.sessions(results))
    )
    return section(
        "## The API",
        f"""`bench/batch`: `shoal serve` on one core, site and callers on another, {results["concurrency"]} concurrent
        pages, no delay, robots.txt obeyed, medians of {results["rounds"]} rounds. The time of a local batch is that
        from the POST to the decoded response with the content of all pages. It is compared with a crawl in memory that
        has the same URLs, spider, settings and core, in a process that has imported everything. A batch on Celery has
        one worker with two processes and no rate limit. It is compared with tasks that do nothing, through the same
        Redis, until the last result is stored. The worker without events keeps late acknowledgement, no prefetching and
        results, but sends no events and does not store that a task has started. With Celery, all processes share the
        cores.""",
        rates,
        f"""Batches of 3 pages, one after the other, {results["batches"]} for each result: alone, and while another
        caller sends batches of 1,000 pages of the same host without a pause.""",
        small,
        "Batches that are sent at the same moment to a new server. Its memory is that after one small batch (idle), "
        "and at its peak.",
        sessions,
        table.markdown(batches.goals(results), left=(0, 3)),
        conditions(results),
    )


def conditions(results: table.Results) -> str:
    """The machine, the servers with their durability, and the versions."""
    machine, versions = results["machine"], results["versions"]
    servers = []
    for kind, server in results["servers"].items():
        settings = ", ".join(f"{key} {value}" for key, value in server["settings"].items())
        servers.append(f"{NAMES[kind]} {server['version']} ({settings})")
    each = [versions] if "shoal" in versions else versions.values()
    packages = {f"{name} {version}" for some in each for name, version in some.items()}
    return (
        f"Measured {results['measured'][:10]}: {machine['cpu']}, {machine['cores']} cores, {machine['system']}, "
        f"{'; '.join(servers)}. A synced write of 8 KB to this disk took {results['sync_us']:,} us. "
        f"{', '.join(sorted(packages, key=str.lower))}."
    )


def section(*parts: str) -> str:
    """Wrap the prose, but not tables and headings."""
    return "\n\n".join(part if part.startswith(("|", "#")) else wrapped(part) for part in parts if part)


def wrapped(prose: str) -> str:
    return textwrap.fill(" ".join(prose.split()), 120, break_on_hyphens=False, break_long_words=False)
