"""Rules, layouts and constants are written once, in Python. Scripts and functions on servers get them from there."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest

from shoal.clients.postgres_schema import functions
from shoal.clients.redis import ScriptFolder, load_script
from shoal.frontier import rules
from shoal.frontier.host_policy import DEFAULT_HOST
from shoal.frontier.postgres.columns import COMPONENT, CONSTANTS
from shoal.frontier.redis.records import SCRIPTS, lua_constants, lua_literals

_TEXTS = (
    rules.LOST_KIND, rules.LOST_EVENT, rules.LOST_REASON, rules.NOTE_EVENT, rules.FAILED_EVENT, rules.WAITS_DETAIL,
    rules.RETRIED_EVENT, rules.RETRIED_DETAIL, rules.UNREADABLE, rules.SEED_ROLE, DEFAULT_HOST, *rules.HALTED,
)  # fmt: skip
_BARE_OFFSET = re.compile(r"\bsub\((?:record|receipt|role|member)\b, *(?:\d+, *)?\d+\)")


def _sources(package: str, folder: str, ending: str) -> dict[str, str]:
    """The text of each file, without comments."""
    found = [each for each in (files(package) / folder).iterdir() if each.name.endswith(ending)]
    assert found
    return {each.name: re.sub(r"--.*", "", each.read_text("utf-8")) for each in found}


_LUA = _sources("shoal.frontier.redis", "lua", ".lua")
_SQL = _sources("shoal.frontier.postgres", "functions", ".sql")
_NAMES = sorted(_LUA)


@pytest.mark.parametrize("name", _NAMES)
def test_scripts_have_no_copies(name: str) -> None:
    text = _LUA[name]
    layouts = {value for value in lua_literals().values() if value.startswith("'<") and len(value) > 6}
    assert not [layout for layout in layouts if layout in text]
    assert not [each for each in _TEXTS if f"'{each}'" in text]
    assert not _BARE_OFFSET.findall(text)
    assert not re.search(r"\b(state|outcome) [~=]= \d", text)


@pytest.mark.parametrize("name", sorted(_SQL))
def test_functions_have_no_copies(name: str) -> None:
    text = _SQL[name]
    assert not [each for each in _TEXTS if f"'{each}'" in text]
    assert not re.search(r"\bSH00\d", text)
    assert not re.search(r"\b(state|place)s? *(=|<>|>|IN \() *\d", text)
    assert not re.search(r"(greatest|least)\([^;]*crawl_delay", text)


def test_statements_for_files_have_no_copies() -> None:
    sources = [
        each.read_text("utf-8") for each in files("shoal.frontier.sqlite").iterdir() if each.name.endswith(".py")
    ]
    assert not [text for text in sources if re.search(r"\bstate = \d", text)]


def test_every_constant_is_used() -> None:
    """A name that no script uses is left over."""
    lua, sql = "\n".join(_LUA.values()), "\n".join(_SQL.values())
    assert not [name for name in lua_constants() | lua_literals() if not re.search(rf"\b{name}\b", lua)]
    assert not [name for name in CONSTANTS if f"{{{name}}}" not in sql]


def test_constants_reach_the_servers() -> None:
    for name in _NAMES:
        text = load_script(SCRIPTS, name.removesuffix(".lua")).text
        assert f"state == {rules.LEASED} " in text
        assert not [each for each in lua_literals() if re.search(rf"\b{each}\b", re.sub(r"--.*|'[^']*'", "", text))]
        assert "if host.crawl_delay > delay then delay = host.crawl_delay end" in text
    created = functions(COMPONENT)
    delay = "greatest(coalesce(h.delay, e.delay, greatest(r.delay, h.longest)), h.crawl_delay, h.learned_delay)"
    assert f"{delay} AS delay" in created
    assert not re.search(r"\{[A-Z_]+\}", created)


def test_scripts_are_read_together_so_an_upgrade_does_not_mix_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = tmp_path / "upgraded" / "lua"
    scripts.mkdir(parents=True)
    (tmp_path / "upgraded" / "__init__.py").touch()
    for name in ("early", "late"):
        (scripts / f"{name}.lua").write_text(f"return '{name}'")
    monkeypatch.syspath_prepend(tmp_path)
    folder = ScriptFolder("upgraded", ())
    assert "early" in load_script(folder, "early").text
    (scripts / "late.lua").unlink()  # the new version calls it otherwise
    assert "late" in load_script(folder, "late").text
