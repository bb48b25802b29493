"""Help texts, groups of commands, suggestions and shell completion."""

from __future__ import annotations

import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from shoal.cli.main import COMMANDS, app, main
from shoal.messages import did_you_mean

NAMES = [name for group in COMMANDS.values() for name in group]
ROOT: Any = typer.main.get_command(app)


def paths() -> Iterator[tuple[str, ...]]:
    """Each command, with those inside other commands."""
    yield ()
    for name in NAMES:
        yield (name,)
        yield from ((name, inner) for inner in getattr(ROOT.get_command(None, name), "commands", ()))


PATHS = list(paths())


def find(path: tuple[str, ...]) -> Any:
    command = ROOT
    for name in path:
        command = command.get_command(None, name)
    return command


def run(*words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["shoal", *words])
    before = sys.stdout, sys.stderr
    with pytest.raises(SystemExit) as ended:
        main()
    sys.stdout, sys.stderr = before  # it guards them
    output = capsys.readouterr()
    return int(ended.value.code or 0), output.out, output.err


# -- help


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_no_line_of_help_is_cut_off(
    path: tuple[str, ...], columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, text, _ = run(*path, "--help", monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0
    assert max(map(len, text.splitlines())) <= (80 if columns == 80 else 100)
    assert not re.search(r"\w\.\.\.$", text, re.MULTILINE)
    described = " ".join(text.split())
    for param in find(path).params:
        assert param.help, param.name
        assert " ".join(param.help.split()) in described, param.name
    assert "Examples:\n  " in text


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("path", [(), ("hosts",), ("cluster",)], ids=" ".join)
def test_each_command_of_a_list_has_one_line(
    path: tuple[str, ...], columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    _, text, _ = run(*path, "--help", monkeypatch=monkeypatch, capsys=capsys)
    for name in find(path).list_commands(None):
        assert re.search(rf"^  {name} +[A-Z].*\.$", text, re.MULTILINE), name


def test_commands_are_listed_in_groups(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _, text, _ = run("--help", monkeypatch=monkeypatch, capsys=capsys)
    headings = re.findall(r"^(\w+):$", text, re.MULTILINE)
    assert headings == ["Options", "Crawl", "Fleet", "Cluster", "Server", "Inspect", "Develop", "Examples"]
    assert len(NAMES) == len(set(NAMES))
    for name in NAMES:
        assert re.search(rf"^  {name} ", text, re.MULTILINE), name


@pytest.mark.parametrize("name", NAMES)
def test_the_line_of_a_command_is_the_first_sentence_of_its_help(name: str) -> None:
    (entry,) = (group[name] for group in COMMANDS.values() if name in group)
    assert find((name,)).help.partition("\n")[0] == entry.summary


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_the_examples_of_a_command_parse(path: tuple[str, ...]) -> None:
    examples = find(path).epilog.strip().splitlines()
    assert examples
    for example in examples:
        line, _, _ = example.strip().partition(" >")
        for command in line.split(" && "):
            words = shlex.split(re.sub(r"^[A-Z_]+=\S+ ", "", command))
            assert words[: len(path) + 1] == ["shoal", *path] or not path
            parse(words[1:])


def parse(words: list[str]) -> None:
    """Check the command and its options, and run nothing."""
    command, context = ROOT, ROOT.make_context("shoal", list(words))
    while isinstance(command, typer.core.TyperGroup):
        rest = [*context._protected_args, *context.args]
        if not rest:
            return
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


def test_the_list_of_commands_imports_none_of_them() -> None:
    script = (
        "import sys\nfrom shoal.cli.main import main\nsys.argv = ['shoal', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "late = ('shoal.cli.commands', 'shoal.config', 'shoal.runs')\n"
        "print(*sorted(name for name in sys.modules if name.startswith(late)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""


@pytest.mark.parametrize("path", [(), ("run",), ("cluster",)], ids=" ".join)
def test_colour_is_for_terminals_only(path: tuple[str, ...]) -> None:
    plain, piped = on_terminal(path, NO_COLOR="1"), subprocess.run(words_of(path), capture_output=True, text=True)
    assert "\x1b" not in plain
    assert "\x1b" not in piped.stdout
    assert "\x1b" not in on_terminal(path, TERM="dumb")
    coloured = on_terminal(path)
    assert "\x1b[1mOptions:\x1b[0m" in coloured
    assert re.sub(r"\x1b\[\d+m", "", coloured) == plain


def words_of(path: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "shoal.cli.main", *path, "--help"]


def on_terminal(path: tuple[str, ...], **environ: str) -> str:
    ours, theirs = pty.openpty()
    environ = {**os.environ, "NO_COLOR": "", "TERM": "xterm", "COLUMNS": "80", **environ}
    with subprocess.Popen(words_of(path), stdout=theirs, env=environ) as process:
        os.close(theirs)
        output = b""
        while True:
            try:
                output += (read := os.read(ours, 65536))
            except OSError:  # the other side is closed
                break
            if not read:
                break
        assert process.wait() == 0
    os.close(ours)
    return output.decode().replace("\r\n", "\n")


# -- suggestions

SPIDER = "from shoal import Spider\n\n\nclass Books(Spider):\n    pass\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["crwal"], "unknown command crwal; did you mean crawl? see `shoal --help`"),
        (["nonsense"], "unknown command nonsense; see `shoal --help`"),
        (["cluster", "stats"], "unknown command stats; did you mean status? see `shoal cluster --help`"),
        (["run", "books.py", "--outpt", "x"], "unknown option --outpt; did you mean --output? see `shoal run --help`"),
        (["hosts", "set", "h", "--dely"], "unknown option --dely; did you mean --delay? see `shoal hosts set --help`"),
        (["--verison"], "unknown option --verison; did you mean --version? see `shoal --help`"),
        (["crawl", "u", "--any-sit"], "unknown option --any-sit; did you mean --any-site? see `shoal crawl --help`"),
        (["run", "Boks"], "there is no spider Boks: use FILE.py, .*; did you mean books.py:Books?"),
        (["start", "Boks"], "there is no spider Boks: use FILE.py, .*; did you mean books.py:Books?"),
        (["run", "boks.py"], ".*boks.py.*; did you mean books.py?"),
        (["run", "books.py:Boks"], ".*; did you mean books.py:Books?"),
        (["run", "Planes"], "there is no spider Planes: .*; `shoal list` shows the spiders in this folder"),
        (["run", "Novls"], "there is no spider Novls: .*; did you mean novels?"),
        (["config", "--set", "downlod_delay=3"], ".*did you mean.*download_delay.*"),
        (["config", "--set", "delay=3"], ".*did you mean.*download_delay.*"),
        (["config", "--set", "frontier=postgres://h/d"], ".*; did you mean postgresql://?"),
        (["config", "--set", "frontier=redsi://h"], ".*; did you mean redis://?"),
        (["config", "--set", "cluster.coordinator=zokeeper://h"], ".*; did you mean zookeeper://?"),
        (["run", "books.py", "-o", "x.jsnl"], ".*; did you mean .jsonl?"),
        (["run", "books.py", "-o", "mysq://h/d"], ".*; did you mean mysql://?"),
        (["start", "books.py", "--mode", "distribted"], ".*; did you mean distributed?"),
        (["completion", "basch"], ".*use bash, zsh or fish; did you mean bash?"),
        (["run", "--scraper", "novels"],
         "unknown option --scraper; name the spider without an option: `shoal run SPIDER`; see `shoal run --help`"),
        (["stats", "--scraper", "novels"], "unknown option --scraper; see `shoal stats --help`"),
        (["run", "books.py", "--max-time", "2x"], "--max-time must be a positive number of seconds, or one with s, m, "
         "h or d, such as 90, 30m or 2h, not '2x'"),
        (["run", "books.py", "--max-bytes", "-1"], "--max-bytes must be a positive number of bytes, or one with .*"),
        (["run", "books.py", "-O", "a.json"], "a.json: a JSON array is complete only at its end; use a.jsonl, .*"),
        (["run"], "missing argument 'SPIDER'; see `shoal run --help`"),
        (["run", "books.py", "--delay"], "option '--delay' requires an argument; see `shoal run --help`"),
    ],
)  # fmt: skip
def test_an_unknown_name_suggests_the_nearest(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "books.py").write_text(SPIDER)
    (tmp_path / "shoal.toml").write_text('[spiders.novels]\nfile = "books.py"\n')
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*words, monkeypatch=monkeypatch, capsys=capsys)
    assert (code, out) == (2, "")
    pattern = message.replace("?", r"\?")
    assert re.fullmatch(f"shoal: {pattern}\n", err), err


@pytest.mark.parametrize("words", [["config"], ["--help"], ["run", "--help"], ["list"]])
def test_a_command_ends_quietly_when_its_reader_has_gone(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "books.py").write_text(SPIDER)
    command = [sys.executable, "-m", "shoal.cli.main", *words]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_name_that_resembles_nothing_suggests_nothing() -> None:
    assert did_you_mean("zzz", ["crawl", "run"]) == ""
    assert did_you_mean("crawel", ["crawl", "run"]) == "; did you mean crawl?"


def test_a_spider_of_the_registry_can_be_run_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "books.py").write_text(SPIDER)
    (tmp_path / "shoal.toml").write_text('[spiders.novels]\nfile = "books.py"\noutputs = ["novels.jsonl"]\n')
    monkeypatch.chdir(tmp_path)
    done = subprocess.run([sys.executable, "-m", "shoal.cli.main", "run", "novels"], capture_output=True, text=True)
    assert done.returncode == 5
    assert "nothing was crawled: the spider has no start requests" in done.stderr
    assert "novels.jsonl" in done.stderr


# -- completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_completion_script(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, script, _ = run("completion", shell, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0
    assert f"_SHOAL_COMPLETE=complete_{shell}" in script


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("shoal cr", {"crawl"}),
        ("shoal re", {"resume", "retry-failed"}),
        ("shoal cluster s", {"status", "scale"}),
        ("shoal run --out", {"--output"}),
        ("shoal completion ", {"bash", "zsh", "fish"}),
    ],
)
def test_bash_completes_commands_and_options(line: str, expected: set[str], tmp_path: Path) -> None:
    """The script itself in a real shell, with a `shoal` in the path."""
    (tmp_path / "shoal").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m shoal.cli.main "$@"\n')
    (tmp_path / "shoal").chmod(0o755)
    words = line.split(" ")
    script = (
        f'eval "$(shoal completion bash)"\nCOMP_WORDS=({shlex.join(words)})\nCOMP_CWORD={len(words) - 1}\n'
        "$(complete -p shoal | sed 's/.*-F \\([^ ]*\\) .*/\\1/') shoal\nprintf '%s\\n' \"${COMPREPLY[@]}\""
    )
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environ, check=True)
    assert set(done.stdout.split()) == expected
