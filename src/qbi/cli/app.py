"""The `qbi` program and its commands."""

from importlib import import_module
from typing import Annotated

import typer

from qbi import __version__
from qbi.cli import audit, claims, data, diff, inspect, ledger, predict, replay

LABORATORY = ("reproduce", "compare", "frontier", "calibrate", "bench", "measure")
"""Commands of `qbi.lab`, found by name: nothing of the product imports it."""

app = typer.Typer(
    name="qbi",
    help="Shows what a federated-learning server could read out of its clients' gradients, and stops it.\n\n"
    "For auditing one's own systems: both sides of the protocol are simulated on this machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("audit")(audit.audit)
app.command("diff")(diff.diff)
app.command("predict")(predict.predict)
app.command("replay")(replay.replay)
app.command("data")(data.data)
app.command("inspect")(inspect.inspect)
app.command("ledger")(ledger.ledger)
app.command("claims")(claims.claims)
for _name in LABORATORY:
    app.command(_name, rich_help_panel="Laboratory")(getattr(import_module(f"qbi.lab.commands.{_name}"), _name))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),  # noqa: ARG001
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            envvar="QBI_PLUGINS",
            help="A module or file.py of yours that adds attacks, defences, detectors, formats, data sources or layer rules.",
        ),
    ] = None,
) -> None:
    """Options of the program itself."""
    if plugin:
        from qbi.auditing.loading import load_plugin

        for name in plugin:
            load_plugin(name)
