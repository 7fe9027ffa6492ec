"""The `qbi` program and its commands."""

import typer

from qbi import __version__
from qbi.cli import audit, bench, calibrate, compare, data, frontier, inspect, ledger, predict, replay, reproduce

app = typer.Typer(
    name="qbi",
    help="Shows what a federated-learning server could read out of its clients' gradients, and stops it.\n\n"
    "For auditing one's own systems: both sides of the protocol are simulated on this machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("audit")(audit.audit)
app.command("predict")(predict.predict)
app.command("replay")(replay.replay)
app.command("reproduce")(reproduce.reproduce)
app.command("compare")(compare.compare)
app.command("data")(data.data)
app.command("inspect")(inspect.inspect)
app.command("frontier")(frontier.frontier)
app.command("ledger")(ledger.ledger)
app.command("calibrate")(calibrate.calibrate)
app.command("bench")(bench.bench)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Options of the program itself."""
