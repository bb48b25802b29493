"""Plain output is that of Rich, and plain values are those that Typer makes."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Annotated, Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text
from typer.main import get_command

from shoal.cli.help import spare_pydantic
from shoal.cli.progress import PlainConsole, print_rows

CELLS = st.text("ab -/é\u4e2d", max_size=30)
WIDTHS = st.integers(20, 60)


@given(rows=st.lists(st.tuples(CELLS, CELLS), max_size=4), width=WIDTHS)
def test_a_plain_table_is_that_of_rich(rows: list[tuple[str, str]], width: int) -> None:
    plain, rich = io.StringIO(), io.StringIO()
    PlainConsole(plain, width).print_rows(rows)
    print_rows(Console(file=rich, width=width, highlight=False, markup=False), rows)
    assert plain.getvalue() == rich.getvalue()


def test_a_long_path_is_cut_like_in_rich() -> None:
    rows = [("done", "1"), ("written to", "/a/long/path" * 9)]
    plain, rich = io.StringIO(), io.StringIO()
    PlainConsole(plain, 80).print_rows(rows)
    print_rows(Console(file=rich, width=80, highlight=False, markup=False), rows)
    assert plain.getvalue() == rich.getvalue()
    assert "\u2026" in plain.getvalue()


@given(text=st.text("ab :\n[]é", max_size=60).map(str.strip), width=WIDTHS, soft_wrap=st.booleans())
def test_plain_lines_are_those_of_rich(text: str, width: int, soft_wrap: bool) -> None:
    plain, rich = io.StringIO(), io.StringIO()
    PlainConsole(plain, width).print(text, style="bold", soft_wrap=soft_wrap)
    Console(file=rich, width=width, highlight=False, markup=False).print(Text(text), style="bold", soft_wrap=soft_wrap)
    assert plain.getvalue() == rich.getvalue()


def parsed(arguments: list[str], *, spared: bool) -> object:
    """What a command receives, or the error."""
    received: list[dict[str, Any]] = []
    app = typer.Typer(add_completion=False)

    @app.command()
    def command(
        name: str,
        texts: Annotated[list[str], typer.Option("-t")] = [],
        number: Annotated[int, typer.Option("-n", min=1, max=50)] = 1,
        speed: Annotated[float | None, typer.Option("-s")] = None,
        flag: Annotated[bool | None, typer.Option("--flag/--no-flag")] = None,
    ) -> None:
        received.append(locals())

    made: Any = get_command(app)
    for param in made.params if spared else ():
        spare_pydantic(param)
    try:
        made.main(arguments, standalone_mode=False)
    except Exception as error:
        return type(error), str(error)
    values = {key: received[0][key] for key in ("name", "texts", "number", "speed", "flag")}
    return {key: (type(value), value) for key, value in values.items()}


@pytest.mark.parametrize(
    "arguments",
    [
        "a", "", "a -t b -t c", "a -n 7", "a -n 007", "a -n 0", "a -n 51", "a -n x", "a -n -1", "a -n 1_0", "a -n 1.0",
        "a -n +3", "a -n ٣", "a -s 1.5", "a -s x", "a --flag", "a --no-flag", "a -n 99999999999999999999",
    ],
)  # fmt: skip
def test_values_and_errors_are_those_of_typer(arguments: str) -> None:
    assert parsed(arguments.split(), spared=True) == parsed(arguments.split(), spared=False)


def test_a_crawl_into_a_file_imports_neither_rich_nor_pydantic() -> None:
    script = (
        "import sys\nfrom shoal.cli.main import main\nsys.argv = ['shoal', 'crawl', 'http://127.0.0.1:1/', '--set',"
        " 'retry.max_attempts=1']\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(*{name.split('.')[0] for name in sys.modules} & {'rich', 'pydantic'})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "", done
    assert "failed" in done.stderr
