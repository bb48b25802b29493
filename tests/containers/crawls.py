"""Crawls of the site through the API, seen from outside the containers, and what the site and the results say."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from base64 import b64encode
from collections import Counter
from typing import Any

from tests.containers.checks import Failed, wait_for
from tests.containers.engine import PYTHON_IMAGE, ROOT, Podman
from tests.containers.site import PAGES, PORT, page_paths

NETWORKS = "10.0.0.0/8,172.16.0.0/12,192.168.0.0/16"
"""What crawls may reach: the networks that podman makes."""


def ask(url: str, headers: dict[str, str], body: Any = None, timeout: float = 30.0) -> Any:
    """The JSON that the URL answers."""
    request = urllib.request.Request(url, headers=headers)
    if body is not None:
        request.add_header("Content-Type", "application/json")
        request.data = json.dumps(body).encode()
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.load(answer)


def status_of(url: str, headers: dict[str, str] | None = None) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers or {}), timeout=10.0) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code


def login(user: str, password: str) -> dict[str, str]:
    return {"Authorization": f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}"}


class Site:
    """The site, in a container of its own in the network of the others, where its name is ``site``."""

    def __init__(self, podman: Podman, network: str) -> None:
        self._podman = podman
        self.container = podman(
            "run", "--detach", "--read-only", "--network", f"{network}:alias=site", "--volume",
            f"{ROOT / 'tests' / 'containers' / 'site.py'}:/site.py:ro", PYTHON_IMAGE, "python", "/site.py",
        )  # fmt: skip
        self._address = address_of(podman, self.container)
        wait_for("the site answers", lambda: self.visits() is not None, 30.0)

    def url(self, name: str) -> str:
        """The first page of one of its sites, as containers see it."""
        return f"http://site:{PORT}/{name}/0"

    def visits(self, name: str = "") -> list[str]:
        """The paths that were requested so far, of one of its sites."""
        return [path for _, path in self._visits() if path.startswith(f"/{name}/")]

    def open_gate(self) -> None:
        """From now on all pages are answered."""
        ask(f"http://{self._address}:{PORT}/-/open", {})

    def latest_client(self) -> str:
        """The address of the container that requested a page last."""
        return self._visits()[-1][0]

    def _visits(self) -> list[tuple[str, str]]:
        return [(client, path) for client, path in ask(f"http://{self._address}:{PORT}/-/visits", {})]

    def wait_for(self, name: str, count: int, timeout: float = 90.0) -> None:
        wait_for(f"{count} visits of {name}", lambda: len(self.visits(name)) >= count, timeout)

    def check(self, name: str, results: list[str], may_repeat: int = 0) -> None:
        """Each page is among the results once, and was fetched once, except those that a killed process had in work."""
        pages = page_paths(name)
        repeated = {path: count for path, count in Counter(results).items() if count > 1}
        if set(results) != pages or repeated:
            raise Failed(
                f"{len(pages)} pages, {len(results)} results; missing: {sorted(pages - set(results))}, "
                f"unknown: {sorted(set(results) - pages)}, repeated: {repeated}"
            )
        visits = Counter(self.visits(name))
        again = {path: count for path, count in visits.items() if count > 1}
        if not pages <= visits.keys():
            raise Failed(f"the site knows nothing of {sorted(pages - visits.keys())}")
        if sum(again.values()) - len(again) > may_repeat:
            raise Failed(f"fetched more than once: {again}; {may_repeat} such fetches are allowed")


def address_of(podman: Podman, container: str) -> str:
    """Its address in podman's bridge network."""
    found = podman("inspect", "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}} {{end}}", container)
    if not found:
        raise Failed(f"{container} has no address")
    return found.split()[0]


class Api:
    """The HTTP API of the containers."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self._headers = {"Authorization": f"Bearer {token}"}

    def ask(self, path: str, body: Any = None, timeout: float = 30.0) -> Any:
        return ask(f"{self.url}{path}", self._headers, body, timeout)

    def wait_ready(self) -> None:
        wait_for(f"{self.url} is ready", lambda: status_of(f"{self.url}/ready") == 200, 90.0)

    def wait_for_workers(self, count: int, timeout: float = 90.0) -> None:
        wait_for(
            f"{count} Celery workers",
            lambda: self.ask("/api/crawl/distributed/status").get("workers") == count, timeout,
        )  # fmt: skip

    def begin(self, url: str, *, distributed: bool, options: dict[str, Any] | None = None) -> str:
        """A crawl, by default of all pages behind this one; the path of its session."""
        everything = {"format": "fields", "fields": {"path": "h1"}, "depth": 10, "max_pages": 2 * PAGES}
        body = {"urls": [url], "distributed": distributed, "wait": False, "options": options or everything}
        started = self.ask("/api/crawl/batch", body)
        return str(started["status_url"])

    def results(self, session: str, timeout: float = 180.0) -> list[str]:
        """The pages that were fetched, when the session is finished. The server may be away for a while."""

        def finished() -> Any:
            found = self.ask(f"{session}?after=0&limit=1000")
            return found if found["state"] == "finished" else None

        results = wait_for(f"the end of {session}", finished, timeout)["results"]
        failed = [result for result in results if result["status"] != "success"]
        if failed:
            raise Failed(f"{len(failed)} of {len(results)} pages failed, such as {failed[0]}")
        return [result["content"]["path"] for result in results]
