"""`fastcheck completion SHELL`: click's own script for a shell; `completing.py` has the names that it asks for."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
#: Where click looks for what the script wants to know; follows from the program's name.
_VARIABLE = "_FASTCHECK_COMPLETE"


@click.command(
    epilog="""\b
In ~/.bashrc:                   eval "$(fastcheck completion bash)"
In ~/.zshrc:                    eval "$(fastcheck completion zsh)"
Once, for fish:
  fastcheck completion fish > ~/.config/fish/completions/fastcheck.fish"""
)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script with which a shell completes commands.

    And their options, nodes, jobs and steps. Names are asked of the daemon, for a second at most; if it is silent,
    none are offered.
    """
    script = get_completion_class(shell)
    assert script is not None, "click knows these three"
    click.echo(script(ctx.find_root().command, {}, "fastcheck", _VARIABLE).source())
