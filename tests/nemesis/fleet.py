"""One run on a site: `shoal start` with many start URLs, workers, and a file and a table as outputs."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.nemesis.site import Site
from tests.support import forking
from tests.support.databases import PostgresServer, shared
from tests.support.forking import SHOAL

SPIDER = """
from shoal import Spider

class Nemesis(Spider):
    name = "nemesis"

    def parse(self, response):
        page = response.css("h1::text").get()
        for record in response.css("p.record"):
            number, visit = record.css("::attr(data-number)").get(), record.css("::attr(data-visit)").get()
            yield {"page": page, "record": int(number), "visit": int(visit)}
        yield response.follow_all("a")
"""

SETTINGS: dict[str, Any] = {
    "download_delay": 0,
    "throttle.enabled": False,
    "concurrency": 16,
    "concurrency_per_host": 8,
    "lease.ttl": 6,
    "lease.batch": 20,
    "queue.max_size": 1000,  # the seeder waits for room in the queue, so seeding lasts as long as the crawl
}


class Fleet:
    """The processes of a run. A process that fails before its work starts is restarted, as by a supervisor, up to
    ``restarts`` times in total."""

    def __init__(
        self,
        folder: Path,
        frontier: str,
        site: Site,
        *,
        workers: int = 3,
        restarts: int = 5,
        shared_output: str = "",
        environment: Mapping[str, str] = {},
        **settings: Any,
    ) -> None:
        """``shared_output``: instead of a table of the run and a file of the first worker, every worker gets this.
        ``environment``: additional variables of the processes."""
        self.folder = folder
        self.frontier = frontier
        self.run_id = "n" + secrets.token_hex(4)
        self.table = f"items_{self.run_id}"
        self.output = folder / "items.jsonl"
        self.database = shared(PostgresServer).url
        self.exits: list[str] = []
        """Processes that failed during their work, with the end of their logs."""
        self.false_starts: list[str] = []
        """Processes that failed before their work started. They are restarted."""
        self._settings = SETTINGS | settings
        self._commands: dict[str, list[str]] = {}
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._agents: dict[str, str] = {}
        (folder / "spider.py").write_text(SPIDER)
        (folder / "starts.txt").write_text("\n".join(site.start_urls))
        self._site = site
        self._restarts = restarts
        self._starts_again = False
        self._workers = workers
        self._shared_output = shared_output
        self._environment = {**os.environ, **environment}

    # -- processes

    def start(self) -> None:
        """Create the run, and push its start requests while the workers run."""
        output = () if self._shared_output else ("-o", f"{self.database}?table={self.table}")
        self._launch("start", "start", "--urls-file", "starts.txt", *output)

    def work(self) -> None:
        """Start the workers. The first one writes the file."""
        for number in range(self._workers):
            output = self._shared_output or ("" if number else str(self.output))
            self._launch(f"worker {number}", "worker", *(("-o", output) if output else ()))

    def work_without_output(self) -> None:
        """Start one more worker, which writes nothing."""
        self._launch("worker without output", "worker")

    def _launch(self, name: str, command: str, *arguments: str) -> None:
        options = [f"--set={key}={value}" for key, value in self._settings.items()]
        self._commands[name] = [
            *SHOAL, command, "spider.py", "--run-id", self.run_id, "--frontier", self.frontier, "--quiet", *options,
            *arguments,
        ]  # fmt: skip
        self._spawn(name)

    def _spawn(self, name: str) -> None:
        """Start a process with its own user agent, which identifies it in the log of the site."""
        agent = self._agents[name] = f"{name.replace(' ', '-')}-{secrets.token_hex(3)}"
        with self._log_of(name).open("ab") as log:
            self._processes[name] = forking.Popen(
                [*self._commands[name], f"--set=user_agent={agent}"], cwd=self.folder, stdout=log, stderr=log,
                env=self._environment,
            )  # fmt: skip

    def _log_of(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '-')}.log"

    def words_of(self, name: str) -> str:
        return self._log_of(name).read_text(errors="replace")

    def seed_again(self) -> None:
        """Run `shoal start` again if it has ended, as an operator does after a restore: the restored store may lack the
        last start requests."""
        self._starts_again = True

    def signal(self, pid: int, number: signal.Signals) -> bool:
        """Send a signal to a process of the fleet. A killed one is started again. False if there is no such process."""
        for name, process in self._processes.items():
            if process.pid == pid and process.poll() is None:
                process.send_signal(number)
                if number == signal.SIGKILL:
                    process.wait()
                    self._spawn(name)
                return True
        return False

    def wait(self, timeout: float) -> bool:
        """Wait until all processes have ended. After the timeout, kill the others and return False."""
        until = time.monotonic() + timeout
        while self.look():
            if time.monotonic() > until:
                self.close()
                return False
            time.sleep(0.05)
        return True

    def look(self) -> bool:
        """Whether a process is still running. Restarts processes that failed before their work started."""
        working = False
        for name, process in list(self._processes.items()):
            code = process.poll()
            if code is None:
                working = True
            elif code == 0 and name == "start" and self._starts_again:
                self._starts_again = False
                self._spawn(name)
                working = True
            elif code:
                del self._processes[name]
                words = f"{name} ended with {code}: {self.words_of(name)[-1500:]}"
                begun = self._agents[name] in self._site.agents()
                (self.exits if begun or len(self.false_starts) >= self._restarts else self.false_starts).append(words)
                if not begun and words not in self.exits:
                    self._spawn(name)
                    working = True
        return working

    def audit(self) -> str:
        """The output of `shoal audit`."""
        return self._command("audit", self.run_id)[1]

    def audit_outputs(self, spec: str) -> tuple[int, str]:
        """The exit code and the output of `shoal audit`, which counts in this output."""
        return self._command("audit", self.run_id, "-o", spec)

    def export(self, spec: str) -> None:
        """Write the file again, as the message of a changed file says."""
        code, text = self._command("export", self.run_id, "-O", spec)
        assert code == 0, text

    def _command(self, *words: str) -> tuple[int, str]:
        done = forking.run(
            [*SHOAL, *words, "--frontier", self.frontier],
            cwd=self.folder, env=self._environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def close(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
