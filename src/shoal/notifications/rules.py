"""Which rules apply to a run and a problem. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from shoal.monitoring.problem import Problem, ProblemLimits
from shoal.notifications.settings import Rule

QUIET = frozenset({"finished"})
"""Events that are sent only if a rule names them: they are not problems."""
EVERYTHING = Rule()
"""The rule of settings without rules: all problems through all channels."""


def limits_for(rules: Collection[Rule], run_id: str, spider: str) -> ProblemLimits:
    """The limits for a run. A rule for the run takes precedence over one for its spider, and that over one for all
    runs."""
    limits = ProblemLimits()
    matching = [rule for rule in rules if _matches(rule, run_id, spider)]
    for rule in sorted(matching, key=lambda rule: (rule.run is not None, rule.spider is not None)):
        limits = replace(limits, **rule.limits)
    return limits


def channels_for(rules: Collection[Rule], problem: Problem, channels: Mapping[str, object]) -> list[str]:
    """The channels through which a problem is sent, in the order of the settings. A failing channel is reported through
    all other channels, whatever the rules say."""
    if problem.kind == "channel_failing":
        return [name for name in channels if name != problem.about]
    chosen: set[str] = set()
    for rule in rules or (EVERYTHING,):
        wanted = problem.kind in rule.events if rule.events is not None else problem.kind not in QUIET
        if wanted and _matches(rule, problem.run_id, problem.spider):
            chosen.update(rule.channels or channels)
    return [name for name in channels if name in chosen]


def _matches(rule: Rule, run_id: str, spider: str) -> bool:
    return rule.run in (None, run_id) and rule.spider in (None, spider)
