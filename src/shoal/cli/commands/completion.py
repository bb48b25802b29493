"""`shoal completion`: complete commands and options with the Tab key."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli.help import Commands
from shoal.errors import ConfigError
from shoal.suggestions import did_you_mean

_SHELLS = ("bash", "zsh", "fish")

app = Commands()


@app.add(
    examples="""
    shoal completion bash >> ~/.bashrc
    shoal completion zsh >> ~/.zshrc
    shoal completion fish > ~/.config/fish/completions/shoal.fish
    """
)
def completion(
    shell: Annotated[
        str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.", autocompletion=lambda: list(_SHELLS))
    ],
) -> None:
    """Print the completion script for a shell.

    Add the script to your shell's startup file and start a new shell. The Tab key then completes commands and options.
    For zsh, `compinit` must run first.
    """
    from typer._completion_shared import get_completion_script

    if shell not in _SHELLS:
        raise ConfigError(f"cannot complete in {shell}: use bash, zsh or fish{did_you_mean(shell, _SHELLS)}")
    print(get_completion_script(prog_name="shoal", complete_var="_SHOAL_COMPLETE", shell=shell))
