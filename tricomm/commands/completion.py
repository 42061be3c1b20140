"""`tricomm completion`: what a shell needs to complete our commands and options."""

from __future__ import annotations

import click


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that makes SHELL complete commands and options.

    \b
    eval "$(tricomm completion bash)"          # in ~/.bashrc
    eval "$(tricomm completion zsh)"           # in ~/.zshrc
    tricomm completion fish > ~/.config/fish/completions/tricomm.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "the shells that are offered are click's own"
    root = click.get_current_context().find_root().command
    click.echo(kind(root, {}, "tricomm", "_TRICOMM_COMPLETE").source())
