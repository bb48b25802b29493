"""How help looks, and how commands are found."""

from __future__ import annotations

import inspect
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from importlib import import_module
from typing import Annotated, Any, NamedTuple, TextIO, TypeAlias, TypeVar, cast, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from shoal.messages import did_you_mean, printable

# Makes sure that only printable text reaches the terminal.


class OutputClosed(BrokenPipeError):
    """The reader of standard output has gone, such as ``head``. It has no errno: Typer would end with code 1."""


class _SafeStream:
    """A text stream that writes printable text only. Everything else is passed on to the stream.

    Colours are escape sequences: code that prints them writes to ``raw_stream`` and makes the text safe itself.
    """

    def __init__(self, stream: TextIO) -> None:
        self.raw_stream = stream

    def write(self, text: str) -> int:
        try:
            self.raw_stream.write(printable(text, lines=True))
        except BrokenPipeError:
            raise OutputClosed from None
        return len(text)

    def flush(self) -> None:
        try:
            self.raw_stream.flush()
        except BrokenPipeError:
            raise OutputClosed from None

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self.raw_stream, name)


def guard_terminal() -> None:
    """Make sure that printed text cannot control the terminal. Binary output of items is not affected. A process that
    was started without one of the two streams (``2>&-``) writes its text nowhere."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115 - it stays open
        if not isinstance(stream, _SafeStream):
            setattr(sys, name, _SafeStream(stream))


def flush_output() -> None:
    """Write what is left. If the reader has gone, write it nowhere: Python would complain at the end."""
    try:
        sys.stdout.flush()
    except OutputClosed:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)


def raw_stderr() -> TextIO:
    """Standard error as it was before ``guard_terminal``."""
    return cast(TextIO, getattr(sys.stderr, "raw_stream", sys.stderr))


def raw_stdout() -> TextIO:
    """Standard output as it was before ``guard_terminal``."""
    return cast(TextIO, getattr(sys.stdout, "raw_stream", sys.stdout))


def print_json(values: Iterable[object]) -> None:
    """Print each value as one line of JSON."""
    import msgspec

    for value in values:
        print(msgspec.json.encode(value).decode())


def local_time(at: float) -> str:
    """A Unix time as a date and a time of this machine."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


# Values of options and arguments, without Pydantic where it would change nothing: importing it takes 70 ms.


_MAX_DIGITS = 15


class _Coercion:
    """Stands in for the coercion that Typer makes when a parameter gets its value. It makes that one when it has to,
    such as for a value that is wrong."""

    def __init__(self, param: _Click) -> None:
        self._param = param

    def coerce(self, value: object, param: _Click, ctx: _Click) -> object:
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        plain = _simple(param.type_descriptor, value, many=param.multiple or param.nargs != 1)
        if plain is not None:
            return plain
        param._runtime_param = None
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def spare_pydantic(param: _Click) -> None:
    """Let a parameter of Typer convert plain texts and numbers by itself. Every value and error stays the same."""
    if getattr(param, "_runtime_param", param) is None and hasattr(param, "type_descriptor"):
        param._runtime_param = _Coercion(param)


def _simple(kind: _Click, value: object, *, many: bool) -> object | None:
    """The value as Typer would convert it; None if that is not obvious."""
    info = kind.parameter_info
    if info.parser is not None or kind.is_file or kind.is_path:
        return None
    if many:
        texts = list(value) if kind.annotation == list[str] and isinstance(value, list | tuple) else [None]
        return texts if all(type(text) is str for text in texts) else None
    if kind.annotation is str and type(value) is str:
        return value
    if kind.annotation is int and not info.clamp:
        return _number(value, info.min, info.max)
    return None


def _number(value: object, least: float | None, most: float | None) -> int | None:
    if type(value) is str and value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS:
        value = int(value)
    if type(value) is not int or (least is not None and value < least) or (most is not None and value > most):
        return None
    return value


# Older versions of Typer use Click, newer ones have their own copy of it. This is the right class in both.
UsageError = cast("type[Exception]", typer.BadParameter.__base__)

_F = TypeVar("_F", bound=Callable[..., object])
_Click: TypeAlias = Any
"""A context, formatter, parameter or command: of Click or of Typer, depending on Typer's version."""
_MAX_WIDTH = 100
_SPIDER_OPTIONS = ("--scraper", "--spider", "--crawler")
"""How other commands and other programs name the spider."""
_BOLD, _CYAN, _RESET = "\x1b[1m", "\x1b[36m", "\x1b[0m"


class _Layout:
    """What commands and groups of commands have in common. Mixed into Typer's classes."""

    def parse_args(self, ctx: _Click, args: list[str]) -> list[str]:
        command = cast(_Click, self)
        if not args and command.no_args_is_help and not ctx.resilient_parsing:
            show_help(ctx)
            ctx.exit(2)
        for param in command.params:
            spare_pydantic(param)
        try:
            return cast("list[str]", cast(_Click, super()).parse_args(ctx, _with_run(command, args)))
        except UsageError as error:
            cast(_Click, error).ctx = ctx  # the parser does not always set it
            option = getattr(error, "option_name", None)
            if option is None or not hasattr(error, "possibilities"):
                raise
            if option in _SPIDER_OPTIONS and "SPIDER" in self.collect_usage_pieces(ctx):
                hint = f"name the spider without an option: `{ctx.command_path} SPIDER`"
                return cast("list[str]", ctx.fail(f"unknown option {option}; {hint}"))
            options = [name for param in command.get_params(ctx) for name in (*param.opts, *param.secondary_opts)]
            return cast("list[str]", ctx.fail(f"unknown option {option}{did_you_mean(option, options)}"))  # it raises

    def get_help_option(self, ctx: _Click) -> _Click:
        option = cast(_Click, super()).get_help_option(ctx)
        if option is not None:
            option.callback = _help_callback
            option.help = "Show this help."
            spare_pydantic(option)
        return option

    def collect_usage_pieces(self, ctx: _Click) -> list[str]:
        command = cast(_Click, self)
        pieces = [command.options_metavar] if command.options_metavar else []
        for param in command.get_params(ctx):
            if param.param_type_name == "argument":
                pieces.append(_argument_name(param) if param.required else f"[{_argument_name(param)}]")
                if param.nargs != 1:
                    pieces[-1] += "..."
        if isinstance(self, TyperGroup):
            pieces.append("COMMAND ...")
        return pieces

    def format_options(self, ctx: _Click, formatter: _Click) -> None:
        arguments, options = [], []
        for param in cast(_Click, self).get_params(ctx):
            if param.param_type_name == "argument":
                arguments.append((_argument_name(param), param.help or ""))
            elif not param.hidden:
                options.append((_option_names(param), (param.help or "") + (" Required." if param.required else "")))
        for title, rows in (("Arguments", arguments), ("Options", options)):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
        if isinstance(self, TyperGroup):
            self.format_commands(ctx, formatter)

    def format_epilog(self, ctx: _Click, formatter: _Click) -> None:
        """The examples, line by line as they are."""
        examples = cast("str | None", cast(_Click, self).epilog)
        if examples:
            with formatter.section("Examples"):
                for line in examples.strip().splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line.strip()}\n")


def _with_run(command: _Click, args: list[str]) -> list[str]:
    """The arguments of a command, with its run where the command expects it: every command takes ``--run-id RUN``, and
    RUN as an argument."""
    options = [name for param in command.params for name in param.opts]
    arguments = [_argument_name(param) for param in command.params if param.param_type_name == "argument"]
    if "--run-id" in options:
        is_group = isinstance(command, TyperGroup)
        if not is_group or not args or args[0].startswith("-") or did_you_mean(args[0], command.commands):
            return args
        return ["--run-id", *args]
    if arguments[:1] != ["RUN"]:
        return args
    for place, word in enumerate(args):
        if word == "--run-id" and place + 1 < len(args):
            return [args[place + 1], *args[:place], *args[place + 2 :]]
        if word.startswith("--run-id="):
            return [word.partition("=")[2], *args[:place], *args[place + 1 :]]
        if word == "--":
            break
    return args


class Command(_Layout, TyperCommand):
    """One command."""


class CommandGroup(_Layout, TyperGroup):
    """A command that has commands of its own."""

    def resolve_command(self, ctx: _Click, args: list[str]) -> _Click:
        name = args[0]
        commands = self.list_commands(ctx)
        if name not in commands and not name.startswith("-") and not ctx.resilient_parsing:
            ctx.fail(f"unknown command {name}{did_you_mean(name, commands)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: _Click, formatter: _Click) -> None:
        commands = [(name, cast(_Click, self.get_command(ctx, name))) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(1000)) for name, command in commands])


class CommandEntry(NamedTuple):
    """Where a command is, and what `shoal --help` says of it: the first sentence of its own help."""

    module: str
    summary: str


class RootGroup(CommandGroup):
    """All commands, in groups. The module of a command is imported when the command is used."""

    groups: Mapping[str, Mapping[str, CommandEntry]] = {}

    def list_commands(self, ctx: _Click) -> list[str]:
        return [name for commands in self.groups.values() for name in commands]

    def get_command(self, ctx: _Click, cmd_name: str) -> _Click:
        if cmd_name not in self.commands:
            for commands in self.groups.values():
                if cmd_name in commands:
                    app = import_module(f"shoal.cli.commands.{commands[cmd_name].module}").app
                    self.commands[cmd_name] = cast(_Click, get_group(app).commands[cmd_name])
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: _Click, formatter: _Click) -> None:
        width = max(map(len, self.list_commands(ctx)))
        for title, commands in self.groups.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<{width}}", entry.summary) for name, entry in commands.items()])


def option(usage: str, help: str, **details: Any) -> Any:
    """An option as its help shows it: ``-o, --output FILE``. Without a value it is a flag. ``details``: for Typer."""
    *others, last = usage.split(", ")
    name, _, value = last.partition(" ")
    return typer.Option(*others, name, metavar=value or None, help=help, **details)


def argument(name: str, help: str, **details: Any) -> Any:
    """An argument under the name that its help shows. ``details``: for Typer."""
    return typer.Argument(metavar=name, help=help, **details)


class Commands(typer.Typer):
    """The commands of one module."""

    def __init__(self, *, cls: type[TyperGroup] = CommandGroup, **options: _Click) -> None:
        super().__init__(
            cls=cls, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
            context_settings={"help_option_names": ["-h", "--help"], "max_content_width": _MAX_WIDTH}, **options,
        )  # fmt: skip

    def add(self, name: str | None = None, *, examples: str) -> Callable[[_F], _F]:
        """Decorate the function of a command, which may be a coroutine function. The first sentence of its docstring is
        its line in lists of commands.

        Every command has the option ``--config``."""
        register = self.command(name, cls=Command, epilog=examples)

        def decorate(function: _F) -> _F:
            register(_runnable(function))
            return function

        return decorate


_ConfigFile = Annotated[
    str | None, option("--config FILE", "Read this file instead of shoal.toml.", show_default=False)
]


def _runnable(function: Callable[..., object]) -> Callable[..., object]:
    """The function of a command with the option ``--config``: it is SHOAL_CONFIG for this process and those that it
    starts. A coroutine is run until it is done. A parameter that is a struct stands for the fields of the struct."""
    types: dict[str, object] = {}
    defaults: dict[str, object] = {}
    structs: dict[str, Any] = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if hasattr(parameter.annotation, "__struct_fields__"):
            structs[name] = parameter.annotation
            types |= get_type_hints(parameter.annotation, include_extras=True)
            defaults |= {field: getattr(parameter.default, field) for field in parameter.annotation.__struct_fields__}
        else:
            types[name], defaults[name] = parameter.annotation, parameter.default
    types["config_file"], defaults["config_file"] = _ConfigFile, None

    @wraps(function)
    def run(*, config_file: str | None = None, **options: object) -> object:
        if config_file is not None:
            os.environ["SHOAL_CONFIG"] = os.path.abspath(config_file)
        for name, struct in structs.items():
            options[name] = struct(**{field: options.pop(field) for field in struct.__struct_fields__})
        result = function(**options)
        if inspect.iscoroutine(result):
            import asyncio

            return asyncio.run(result)
        return result

    run.__annotations__ = types
    cast(_Click, run).__signature__ = inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[name])
            for name, default in defaults.items()
        ]
    )
    return run


def _help_callback(ctx: _Click, param: _Click, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        show_help(ctx)
        ctx.exit()


def show_help(ctx: _Click) -> None:
    """Print the help of a context's command: in colour on a terminal, plain elsewhere or with NO_COLOR."""
    text = ctx.get_help() + "\n"
    if wants_colour():
        raw_stdout().write(_coloured(text))
    else:
        sys.stdout.write(text)


def wants_colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _coloured(text: str) -> str:
    """Headings in bold, names of commands and options in cyan. The text is Shoal's own: it needs no escaping."""
    lines, section = [], ""
    for line in text.splitlines(keepends=True):
        heading = re.match(r"([A-Z]\w*):", line)
        if heading:
            section = heading[1]
            line = f"{_BOLD}{heading[0]}{_RESET}{line.removeprefix(heading[0])}"
        elif section not in ("Usage", "Examples"):
            line = re.sub(r"^  (\S+(?: \S+)*)", rf"  {_CYAN}\1{_RESET}", line)
        lines.append(line)
    return "".join(lines)


def _argument_name(param: _Click) -> str:
    return str(param.metavar or param.name.upper()).strip("[]")


def _option_names(param: _Click) -> str:
    names = ", ".join(sorted(param.opts, key=len))
    if param.secondary_opts:
        return f"{names} / {', '.join(param.secondary_opts)}"
    return names if param.is_flag or param.metavar is None else f"{names} {param.metavar}"


def usage_message(error: _Click) -> str:
    """One line for a wrong use of a command."""
    message = error.format_message().rstrip(".")
    command = error.ctx.command_path if error.ctx is not None else "shoal"
    mark = "" if message.endswith("?") else ";"
    return f"{message[:1].lower()}{message[1:]}{mark} see `{command} --help`"
