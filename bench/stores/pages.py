"""The figures of shared frontiers, clusters and the API as sections of a page, with what has to be known of them."""

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
        Of each push half is known already. A lease is completed in the next call, without items or links. "Four
        callers" are tasks of the one client that work at the same time. URLs of 60 characters, on 100 hosts as a
        broad crawl has them, or on one.""",
        table.markdown(tables.queue(results), left=(0,)),
        """On the same PostgreSQL, in the same run, pgqueuer: its own benchmark (`tools/benchmark.py`, strategy drain,
        an entrypoint that does nothing), the best of several numbers of consumers and batch sizes; and its `enqueue`,
        given the same URLs with the URL as `dedupe_key`. It knows no hosts, and a key is free again when its job is
        done. `balanced` and `volatile` give up durability for speed.""",
        table.markdown(tables.peers(results), left=(0, 5)),
        tables.disturbed(results["figures"]),
        conditions(results),
    )


def fleet(results: table.Results, out: Path) -> str:
    """``out`` gets a chart for each site."""
    parts = [
        "## A crawl on a shared frontier",
        f"""`bench/fleet`: the sites and the spider of above, with the frontier on a server; medians of
        {results["rounds"]} rounds of {results["pages"]:,} pages, {results["concurrency"]} requests at a time in each
        worker. One worker has a core, nginx and the database share another. Two workers have a core each;
        {two_workers(results)}. In every run each page was fetched once (by nginx's log), written once, and the ledger
        balances, or the notes say otherwise.""",
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
        return "on this machine that is all of them, so nginx and the database share them with the workers"
    return "nginx and the database share a third"


def growth(results: table.Results) -> str:
    return section(
        "## How a shared frontier grows",
        f"""`bench/fleet-growth`: one client fills an empty server with URLs of 60 characters on {results["hosts"]}
        hosts. At each size it pushes a sample in batches of {tables.PUSHED} (half of it known, from all over the
        frontier), and leases and completes one in batches of {tables.WORKED}. Times are by the wall, with the round
        trip.""",
        table.markdown(tables.growth(results["figures"], results["labels"]), left=(0,)),
        tables.disturbed([figure[act] for figure in results["figures"] for act in ("push", "work")]),
        conditions(results),
    )


def cluster(results: table.Results) -> str:
    return section(
        "## Clusters",
        """`bench/cluster`: nodes as processes, forked from one that has imported everything; they share the cores with
        the servers and the site. A Runner is killed with SIGKILL at any moment between two heartbeats, and its Backup
        works instead; "lost" is when the coordinator has noticed, "first page" when the Backup's first request arrives
        at the site. By the machine's clock, median and (worst).""",
        table.markdown(nodes.takeovers(results), left=(0,)),
        f"""A cluster of a run that is paused, so that nobody crawls, with the default session: from the first fork
        until all are members and every slot is held; then the CPU time of {nodes.seconds(results)} seconds, as per
        cent of one core, and the memory of a node (all of it, and its share when what it has together with the others
        is divided among them).""",
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
        f"""`bench/batch`: `shoal serve` on one core, site and callers on another, {results["concurrency"]} pages at a
        time, no delay, robots.txt obeyed, medians of {results["rounds"]} rounds. A local batch counts from the POST
        to the decoded answer with the content of all pages. The crawl beside it has the same URLs, spider and
        settings, on the same core, in a process that has imported everything; its items are collected in memory. A
        batch on Celery has one worker with two processes and no rate limit; the tasks that do nothing go to the same
        worker, through the same Redis, and count until the last result is stored; then to one that keeps to late
        acknowledgement, no prefetching and results, but sends no events and does not store that a task was begun.
        With Celery nothing is pinned: all share the cores.""",
        rates,
        f"""Batches of 3, one after the other, {results["batches"]} for each figure: alone, and while another caller
        sends batches of 1,000 pages of the same host back to back.""",
        small,
        "Batches that are sent at the same moment, to a new server; its memory before that, after one small batch, and "
        "at most.",
        sessions,
        table.markdown(batches.goals(results), left=(0, 3)),
        conditions(results),
    )


def conditions(results: table.Results) -> str:
    """The machine, the servers and how durable they were, and what ran on them."""
    machine, versions = results["machine"], results["versions"]
    servers = []
    for kind, server in results["servers"].items():
        settings = ", ".join(f"{key} {value}" for key, value in server["settings"].items())
        servers.append(f"{NAMES[kind]} {server['version']} ({settings})")
    each = [versions] if "shoal" in versions else versions.values()
    packages = {f"{name} {version}" for some in each for name, version in some.items()}
    return (
        f"Measured {results['measured'][:10]}: {machine['cpu']}, {machine['cores']} cores, {machine['system']}, "
        f"{'; '.join(servers)}. To write 8 KB to this disk for good took {results['sync_us']:,} us. "
        f"{', '.join(sorted(packages, key=str.lower))}."
    )


def section(*parts: str) -> str:
    """Prose is wrapped; tables and headings stay as they are."""
    return "\n\n".join(part if part.startswith(("|", "#")) else wrapped(part) for part in parts if part)


def wrapped(prose: str) -> str:
    return textwrap.fill(" ".join(prose.split()), 120, break_on_hyphens=False, break_long_words=False)
