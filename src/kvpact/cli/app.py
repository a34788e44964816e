"""The command `kvpact`: reads the command line, calls the part that does the work, and prints errors.

Owns exit codes (0 fine, 1 the check failed or vLLM is not started, 2 the user's mistake) and one-line errors. Never
does the work itself, and imports what a command needs only when it runs, so that `kvpact --help` answers at once. Other
distributions add commands as entry points of the group `COMMANDS`; of those that kvpact's own test kit adds, each says
what to install where it is missing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from kvpact import __version__
from kvpact.errors import ConfigError, KvpactError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints


class OneLineErrors(TyperGroup):
    """Turns kvpact's own errors into one line and exit code 2, or 1 where vLLM is not started, as vLLM itself ends.

    Anything else is a defect and keeps its traceback.
    """

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name) or self.find_elsewhere(cmd_name)
        if command is not None and not command.short_help:  # of the help itself a narrow terminal would see a part
            command.short_help = (command.help or "").partition("\n\n")[0]
        return command

    def find_elsewhere(self, name: str) -> Any:
        """A command that was not added here; None if there is none."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KvpactError as error:
            typer.echo(f"kvpact: {error}", err=True)
            raise typer.Exit(1 if ctx.invoked_subcommand == "serve" else 2) from None


def new_app(what: str, group: type[TyperGroup] = OneLineErrors, *, completes: bool = False) -> typer.Typer:
    """An empty command whose errors are of one line; `what` is its help, `completes` whether shells can complete it."""
    return typer.Typer(
        cls=group,
        help=what,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        add_completion=completes,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


COMMANDS: Final = "kvpact.commands"
"""The group of entry points: the name of a command, and the function that typer makes it from."""

OF_THE_KIT: Final = {
    "conformance": ("kvpact[testkit]", "Run the contract's checks on a cache or connector."),
    "demo": ("kvpact[demo]", "Show on a real vLLM what is computed once and loaded then."),
}
"""Commands of the distribution kvpact-testkit: what brings each, and what it does."""


class _WithOthersCommands(OneLineErrors):
    """Looks for commands of other distributions once kvpact itself has none of that name, or when all are listed."""

    def list_commands(self, ctx: Any) -> list[str]:
        others = {*OF_THE_KIT, *_others().names}
        return [*super().list_commands(ctx), *sorted(others - self.commands.keys())]

    def find_elsewhere(self, name: str) -> Any:
        return _others_command(name)


def _others() -> EntryPoints:
    """The commands that other distributions add."""
    from importlib.metadata import entry_points

    return entry_points(group=COMMANDS)


def _others_command(name: str) -> Any:
    """The command of another distribution, None if nobody has it; a missing or broken one says so when it is run."""
    entry = next(iter(_others().select(name=name)), None)
    if entry is None and name not in OF_THE_KIT:
        return None
    if entry is None:
        reason = f"is in the test kit: pip install '{OF_THE_KIT[name][0]}'"
    else:
        try:
            return _command_from(name, entry.load())
        except Exception as error:
            reason = f"is {entry.value}, which cannot be loaded: {error}"

    def refuse() -> None:
        raise ConfigError(f"`kvpact {name}` {reason}")

    any_arguments = {"allow_extra_args": True, "ignore_unknown_options": True}
    _, does = OF_THE_KIT.get(name, ("", "Another package's."))
    return _command_from(
        name, refuse, help=f"{does}\n\nNot there: `kvpact {name}` {reason}", context_settings=any_arguments
    )


def _command_from(name: str, function: Callable[..., object], **settings: Any) -> Any:
    """The command that typer makes of a function."""
    lone = new_app(name)
    lone.command(name, **settings)(function)
    return typer.main.get_command(lone)


app = new_app(
    "An external KV cache for LLM serving engines: a prompt prefix is never computed twice.",
    _WithOthersCommands,
    completes=True,
)

MemoryOption = Annotated[str | None, typer.Option("--memory", metavar="SIZE", help='Memory tier, such as "4GiB".')]
TierOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tier",
        metavar="URL",
        help='Tier below memory, such as "disk:///var/cache/kvpact?capacity=200GiB"; repeatable.',
    ),
]
ThroughOption = Annotated[
    Literal["connector", "offloading"],
    typer.Option("--through", help="kvpact's own connector, or vLLM's own offloading with kvpact's tiers below it."),
]
ConfigOption = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="TOML file with the same keys.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
PlaceArgument = Annotated[
    str, typer.Argument(metavar="PLACE", help="A tier's URL, or the directory of a disk tier.", show_default=False)
]
KeyFileOption = Annotated[
    Path | None, typer.Option("--record-key-file", metavar="FILE", help="The key that the records are sealed with.")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        from kvpact.cli.vllm_command import answer_for_vllm

        typer.echo(f"kvpact {__version__}")
        answer_for_vllm()
        try:
            typer.echo(f"vLLM {version('vllm')}, beside it")
        except PackageNotFoundError:
            typer.echo("no vLLM beside it")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


class _CountsUnchecked(TyperCommand):
    """Notes how many of its last arguments stand behind `--`: those nobody has misspelt."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[__name__] = len(args) - args.index("--") - 1 if "--" in args else 0
        return super().parse_args(ctx, args)


@app.command(cls=_CountsUnchecked, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL [VLLM ARGUMENTS]...", show_default=False)],
    through: ThroughOption = "connector",
    memory: MemoryOption = None,
    tier: TierOption = None,
    config: ConfigOption = None,
) -> None:
    """Run vllm serve with kvpact as its external cache.

    Options of vLLM's go to vLLM; what stands behind `--` goes there in any case, unchecked.
    """
    from kvpact.cli.serve import serve_model
    from kvpact.cli.vllm_options import refuse_misspelt

    refuse_misspelt(context.args[: max(0, len(context.args) - context.meta[__name__])])
    serve_model(model, context.args, through=through, memory=memory, tiers=tier, config_file=config)


@app.command()
def config(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="With --check.", show_default=False)] = "",
    check: Annotated[
        bool, typer.Option("--check", help="Say what holds of machine, vLLM, model and settings, and what to set.")
    ] = False,
    through: ThroughOption = "connector",
    memory: MemoryOption = None,
    tier: TierOption = None,
    config: ConfigOption = None,
) -> None:
    """Print the JSON for --kv-transfer-config, checked.

    Merges the options with the environment (KVPACT_*) and the file. Standard error says which other options vLLM
    needs beside it. Tiers whose URLs hold a password are left out; one line there names the variable from which vLLM's
    process gets them. With --check nothing of that is printed, and the exit code is 1 if something is wrong.
    """
    from kvpact.cli.serve import chosen_settings
    from kvpact.cli.transfer_config import print_configuration

    if check:
        from kvpact.cli.check import check_everything

        if not check_everything(chosen_settings(memory, tier), os.environ, config, through, model):
            raise typer.Exit(1)
        return
    if model:
        raise ConfigError(f"kvpact config {model}: only --check takes a model")
    print_configuration(chosen_settings(memory, tier), os.environ, config, through)


@app.command()
def inspect(place: PlaceArgument, json: JsonOption = False) -> None:
    """Show what a tier holds: namespaces, blocks, bytes and ages.

    No payload is read.
    """
    from kvpact.cli.slabs import inspect_directory
    from kvpact.cli.stores import inspect_store, parse_place

    where = parse_place(place)
    if isinstance(where, Path):
        inspect_directory(where, as_json=json)
    else:
        inspect_store(where, as_json=json)


@app.command()
def verify(place: PlaceArgument, json: JsonOption = False, key_file: KeyFileOption = None) -> None:
    """Read every record of a tier and report damage.

    Exit code 1 if a record is damaged.
    """
    from kvpact.cli.slabs import verify_directory
    from kvpact.cli.stores import parse_place, verify_shared_store

    where = parse_place(place)
    if isinstance(where, Path):
        sound = verify_directory(where, as_json=json)
    else:
        sound = verify_shared_store(where, as_json=json, key_file=key_file)
    if not sound:
        raise typer.Exit(1)


@app.command()
def gc(
    place: PlaceArgument,
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", metavar="NAME", help="As `kvpact inspect` shows it.", show_default=False),
    ] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="AGE", help='Such as "7d" or "12h".', show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say how many, and remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove what a tier holds of one namespace, or what no engine will ask for. Asks first.

    With --namespace, all of it; the first 8 digits of its name are enough. With --older-than, what was written longer
    ago: of the named namespace, or else records of older formats and those that an engine could keep for itself alone
    and did not live to delete. Slabs count by their last use; one that an engine is using is left alone.
    """
    from kvpact.cli.stores import collect, parse_place
    from kvpact.units import parse_age

    where = parse_place(place)
    if older_than is None and namespace is None:
        raise ConfigError("gc removes nothing by itself: give --namespace NAME, --older-than AGE, or both")
    try:
        seconds = None if older_than is None else parse_age(older_than)
    except ValueError as error:
        raise ConfigError(f'--older-than "{older_than}": {error}') from None

    def said(count: int) -> str:
        return f"{count} {'slab' if isinstance(where, Path) else 'record'}{'' if count == 1 else 's'}"

    if not yes or dry_run:
        found = said(collect(where, namespace, seconds, dry_run=True))
        if dry_run:
            typer.echo(f"would remove {found}")
            return
        if not sys.stdin.isatty():
            raise ConfigError(f"would remove {found}, and nobody can be asked here: add --yes")
        typer.confirm(f"remove {found}?", abort=True)
    typer.echo(f"removed {said(collect(where, namespace, seconds, dry_run=False))}")


@app.command()
def tiers(
    urls: Annotated[
        list[str] | None, typer.Argument(metavar="[URL]...", help="By default the configured ones.")
    ] = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Probe the tiers: health, lookup latency, bytes. Without any, show those of this user's running engines.

    Exit code 1 if a tier does not work.
    """
    from kvpact.cli.serve import COMMAND_LINE, chosen_settings
    from kvpact.cli.stores import show_tiers
    from kvpact.config import load_config

    configured = load_config(chosen_settings(None, urls), os.environ, config, extra_source=COMMAND_LINE)
    if not show_tiers(configured.tiers, as_json=json):
        raise typer.Exit(1)


@app.command()
def status(
    url: Annotated[
        str | None, typer.Argument(metavar="[URL]", help="Of a server: http://localhost:8000.", show_default=False)
    ] = None,
    leases: Annotated[bool, typer.Option("--leases", help="List the plans that hold blocks now.")] = False,
    json: JsonOption = False,
) -> None:
    """Say whether the cache helps: which prompt tokens were not computed, what is wrong, what to change.

    Without URL, of all engines of this user on this machine. Exit code 1 if a tier is down, 2 if no engine answers.
    """
    from kvpact.cli.status import show_status

    if not show_status(url, leases=leases, as_json=json):
        raise typer.Exit(1)


@app.command()
def why(
    response: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="A response's id, such as cmpl-1234.", show_default=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Explain what the cache did for a request, by its response's id; without an id, list the last 20.

    Asks the engines of this user on this machine.
    """
    from kvpact.cli.status import show_requests

    show_requests(response, as_json=json)


@app.command()
def doctor(
    gpu: Annotated[bool, typer.Option("--gpu", help="Examine a GPU, as without it.")] = True,
    json: JsonOption = False,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Gets all figures as JSON, section by section.")
    ] = None,
    device: Annotated[int, typer.Option("--device", metavar="N", help="Of those that the process sees.")] = 0,
) -> None:
    """Try and measure the copies of this machine's GPU, through vLLM's own calls. Takes about a minute.

    Exit code 1 if kvpact must not serve here, and where there is no GPU.
    """
    del gpu  # there is nothing else to examine yet
    from kvpact.cli.doctor import examine_gpu

    if not examine_gpu(device, output, as_json=json):
        raise typer.Exit(1)


def main() -> None:
    """The console script."""
    if sys.platform != "linux":
        print(f"kvpact: kvpact runs on Linux only, and this is {sys.platform}", file=sys.stderr)
        sys.exit(2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # what it cannot encode, such as a model's name, is escaped
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="kvpact")
