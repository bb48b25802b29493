"""The commands to run after a crawl, ready to be pasted."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from shoal.cli.options import is_replaceable
from shoal.config import Config, mask
from shoal.crawling.outcome import NOT_COUNTED
from shoal.crawling.stats import Summary

_OUTPUT_FLAGS = {"-o": "-O", "--output": "--replace"}


def next_steps(summary: Summary, config: Config, command: Sequence[str] = ()) -> list[str]:
    """Lines to print: a heading, and commands that can be pasted. ``command``: the words after ``shoal``."""
    if config.frontier.startswith("memory:"):
        lines = _keep_items(summary, command)
        if summary.state != "finished":
            lines.append("the queue was in memory and is lost; to keep it, add: --frontier sqlite:///crawl.db")
        return lines
    has_password = mask(config.frontier) != config.frontier
    at = [] if has_password else ["--frontier", config.frontier]
    is_file = config.frontier.startswith("sqlite:")
    run = summary.run_id  # the newest run may be another one
    steps = _resume(summary, command)
    if summary.dead_kinds.keys() - NOT_COUNTED.keys():
        steps.append(["retry-failed", run, *at])
    if summary.failed_url:
        steps.append(["why", summary.failed_url, "--run-id", run, *at])
    steps += [] if is_file else [["stats", run, *at]]
    steps.append(["audit", run, *at])
    if summary.stats.items:
        steps.append(["export", run, *at, "-o", f"{run}.csv"])
    if summary.state in ("finished", "limit") and command and not _has_secrets(command) and is_file:
        steps.append(_again(command))
    heading = "next, with the same --frontier:" if has_password else "next:"
    return [heading, *(f"  shoal {shlex.join(step)}" for step in steps)]


def _keep_items(summary: Summary, command: Sequence[str]) -> list[str]:
    """What to write if the items of this run went nowhere."""
    if summary.keeps_items or not summary.stats.items:
        return []
    output = ["-o", f"{summary.spider}.jsonl"]
    count = "the only item was" if summary.stats.items == 1 else f"the {summary.stats.items:,} items were"
    lost = f"{count} not written anywhere and {'is' if summary.stats.items == 1 else 'are'} lost"
    them = "it" if summary.stats.items == 1 else "them"
    if not command or _has_secrets(command):
        return [f"{lost}; to keep {them}, add: {shlex.join(output)}"]
    return [f"{lost}; to keep {them}:", f"  shoal {shlex.join([*command, *output])}"]


def resume_command(words: Sequence[str]) -> str:
    """The command that continues a run, from the words after ``shoal``. Empty if it has a password."""
    return "" if _has_secrets(words) else shlex.join(["shoal", *(word for word in words if word != "--new-run")])


def _resume(summary: Summary, command: Sequence[str]) -> list[list[str]]:
    if not command or _has_secrets(command):
        return []
    command = [word for word in command if word != "--new-run"]
    if summary.limit is not None and summary.limit.setting == "scope.max_items":
        return [_with_option(command, "--max-items", str(2 * max(1, summary.stats.items)))]
    if summary.limit is not None:
        return [list(command)]
    if summary.state == "limit":
        return [_with_option(command, "--max-pages", str(2 * max(1, summary.stats.done)))]
    if summary.state == "failed" or (summary.stats.remaining and summary.state == "stopped"):
        return [command]
    return []


def _again(command: Sequence[str]) -> list[str]:
    """The command for a new run. It replaces the files of this one; databases keep the rows of all runs."""
    words = [
        _OUTPUT_FLAGS[word] if word in _OUTPUT_FLAGS and is_replaceable(following) else word
        for word, following in zip(command, [*command[1:], ""], strict=True)
        if word != "--new-run"
    ]
    return [*words, "--new-run"]


def _with_option(command: Sequence[str], option: str, value: str) -> list[str]:
    words = [word for word in command if not word.startswith(option + "=")]
    if option in words:
        place = words.index(option)
        del words[place : place + 2]
    return [*words, option, value]


def _has_secrets(command: Sequence[str]) -> bool:
    return any(mask(word) != word for word in command)
