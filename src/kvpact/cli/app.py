"""Command line of `kvpact`: reads the arguments, calls the part that does the work, and prints errors.

Owns exit codes (0 fine, 1 the check failed or vLLM is not started, 2 the user's mistake) and one-line errors. Never
does the work itself, and imports a command's modules only when it runs, so that `kvpact --help` answers at once. Other
distributions add commands as entry points of the group `COMMANDS`; a missing command of kvpact's own test kit names the
package to install.
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
        if command is not None and not command.short_help:  # a narrow terminal would cut the help itself
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


def new_app(summary: str, group: type[TyperGroup] = OneLineErrors, *, completes: bool = False) -> typer.Typer:
    """An empty command with one-line errors; `summary` is its help, `completes` lets shells complete it."""
    return typer.Typer(
        cls=group,
        help=summary,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        add_completion=completes,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


COMMANDS: Final = "kvpact.commands"
"""Group of entry points: a command's name, and the function that typer makes it from."""

KIT: Final = "git+https://github.com/kvpact/kvpact#subdirectory=kit"
"""The distribution kvpact-testkit, as pip gets it without an index."""

OF_THE_KIT: Final = {
    "compare": "Compare external KV caches on this machine: answers first, then seconds.",
    "conformance": "Run the contract's checks on a cache or connector.",
    "demo": "Show a real vLLM load the keys and values that it computed before a restart.",
}
"""Summaries of the commands of `KIT`."""


class _WithOthersCommands(OneLineErrors):
    """Adds the commands of other distributions, under names that kvpact itself does not have."""

    def list_commands(self, ctx: Any) -> list[str]:
        others = {*OF_THE_KIT, *_others().names}
        return [*super().list_commands(ctx), *sorted(others - self.commands.keys())]

    def find_elsewhere(self, name: str) -> Any:
        """Command of another distribution, None if no distribution has it; a missing or broken one says so when run."""
        entry = next(iter(_others().select(name=name)), None)
        if entry is None and name not in OF_THE_KIT:
            return None
        if entry is None:
            reason = f"is part of the test kit; run pip install '{KIT}'"
        else:
            try:
                return _command_from(name, entry.load())
            except Exception as error:
                reason = f"cannot be loaded from {entry.value}: {error}"

        def refuse() -> None:
            raise ConfigError(f"`kvpact {name}` {reason}")

        any_arguments = {"allow_extra_args": True, "ignore_unknown_options": True}
        summary = OF_THE_KIT.get(name, "Command of another package.")
        return _command_from(
            name, refuse, help=f"{summary}\n\nNot installed: `kvpact {name}` {reason}", context_settings=any_arguments
        )


def _others() -> EntryPoints:
    """The commands that other distributions add."""
    from importlib.metadata import entry_points

    return entry_points(group=COMMANDS)


def _command_from(name: str, function: Callable[..., object], **settings: Any) -> Any:
    """Command that typer makes of a function."""
    lone = new_app(name)
    lone.command(name, **settings)(function)
    return typer.main.get_command(lone)


app = new_app(
    "An external KV cache for LLM serving engines: loads the keys and values of prompt prefixes computed before.",
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
    typer.Option("--through", help="kvpact's own connector, or vLLM's own offloading above kvpact's tiers."),
]
ConfigOption = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="TOML file with the same keys.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
PlaceArgument = Annotated[
    str, typer.Argument(metavar="PLACE", help="A tier's URL, or the directory of a disk tier.", show_default=False)
]
KeyFileOption = Annotated[
    Path | None, typer.Option("--record-key-file", metavar="FILE", help="File with the key that seals the records.")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        from kvpact.cli.vllm_command import answer_for_vllm

        typer.echo(f"kvpact {__version__}")
        answer_for_vllm()
        try:
            typer.echo(f"vLLM {version('vllm')} in the same environment")
        except PackageNotFoundError:
            typer.echo("no vLLM in this environment")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


class _CountsUnchecked(TyperCommand):
    """Counts the arguments behind `--`, which `serve` passes on unchecked."""

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

    Passes vLLM's own options on to vLLM, and everything behind `--` unchecked.
    """
    from kvpact.cli.serve import serve_model
    from kvpact.cli.vllm_options import refuse_misspelt

    refuse_misspelt(context.args[: max(0, len(context.args) - context.meta[__name__])])
    serve_model(model, context.args, through=through, memory=memory, tiers=tier, config_file=config)


@app.command()
def config(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="With --check.", show_default=False)] = "",
    check: Annotated[
        bool, typer.Option("--check", help="Check machine, vLLM, model and settings; print what to change.")
    ] = False,
    through: ThroughOption = "connector",
    memory: MemoryOption = None,
    tier: TierOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Check the settings and print them as JSON for --kv-transfer-config.

    Merges the options with the environment (KVPACT_*) and the file. Standard error names the other options that vLLM
    needs. Tiers whose URLs hold a password are not printed; standard error names the environment variable that passes
    them to vLLM. With --check, prints findings instead, as lines or as one JSON document; exit code 1 if something is
    wrong.
    """
    from kvpact.cli.serve import chosen_settings
    from kvpact.cli.transfer_config import print_configuration

    if check:
        from kvpact.cli.check import check_everything

        if not check_everything(chosen_settings(memory, tier), os.environ, config, through, model, as_json=json):
            raise typer.Exit(1)
        return
    if model:
        raise ConfigError(f"kvpact config {model}: a model needs --check")
    print_configuration(chosen_settings(memory, tier), os.environ, config, through)


@app.command()
def inspect(place: PlaceArgument, json: JsonOption = False) -> None:
    """List a tier's namespaces, blocks, bytes and ages.

    Reads no payload.
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
        verified = verify_directory(where, as_json=json)
    else:
        verified = verify_shared_store(where, as_json=json, key_file=key_file)
    if not verified:
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count the records or slabs, and remove none.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove without asking for confirmation.")] = False,
    json: JsonOption = False,
) -> None:
    """Remove a namespace from a tier, or the records that no engine will read. Asks for confirmation.

    With --namespace, all its records; the first 8 digits of its name are enough. With --older-than, records written
    longer ago: of the named namespace, or else records of older formats and private records of engines that were
    killed before they could delete them. Slabs count by their last use; a slab in use by an engine stays.
    """
    from kvpact.cli.screen import print_json
    from kvpact.cli.stores import collect, parse_place
    from kvpact.units import parse_age

    where = parse_place(place)
    if older_than is None and namespace is None:
        raise ConfigError("gc needs --namespace NAME, --older-than AGE, or both")
    try:
        seconds = None if older_than is None else parse_age(older_than)
    except ValueError as error:
        raise ConfigError(f'--older-than "{older_than}": {error}') from None

    what = "slab" if isinstance(where, Path) else "record"

    def counted(count: int) -> str:
        return f"{count} {what}{'' if count == 1 else 's'}"

    def show(count: int, done: str) -> None:
        if json:
            print_json({"place": str(where), f"{what}s": count, "removed": not dry_run})
        else:
            typer.echo(f"{done} {counted(count)}")

    if not yes or dry_run:
        found = collect(where, namespace, seconds, dry_run=True)
        if dry_run:
            show(found, "would remove")
            return
        if not sys.stdin.isatty():
            raise ConfigError(
                f"would remove {counted(found)}; standard input is not a terminal, so pass --yes to confirm"
            )
        typer.confirm(f"remove {counted(found)}?", abort=True, err=json)
    show(collect(where, namespace, seconds, dry_run=False), "removed")


@app.command()
def tiers(
    urls: Annotated[
        list[str] | None, typer.Argument(metavar="[URL]...", help="Tiers to probe; default: the configured ones.")
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
        str | None, typer.Argument(metavar="[URL]", help="Server, such as http://localhost:8000.", show_default=False)
    ] = None,
    leases: Annotated[bool, typer.Option("--leases", help="List the plans that hold blocks now.")] = False,
    json: JsonOption = False,
) -> None:
    """Show the use of the cache: prompt tokens served from it, faults, and the one thing to change.

    Without a URL, asks all engines of this user on this machine. Exit code 1 if a tier is down, 2 if no engine answers.
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
    """Explain the cache's answers to a request, by its response's id; without an id, list the last 20.

    Asks the engines of this user on this machine.
    """
    from kvpact.cli.status import show_requests

    show_requests(response, as_json=json)


@app.command()
def doctor(
    gpu: Annotated[bool, typer.Option("--gpu", help="Test a GPU; the default.")] = True,
    json: JsonOption = False,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="File for all figures as JSON, section by section.")
    ] = None,
    device: Annotated[int, typer.Option("--device", metavar="N", help="GPU index within CUDA_VISIBLE_DEVICES.")] = 0,
) -> None:
    """Test and time copies to and from this machine's GPU, through vLLM's own calls. Takes about a minute.

    Exit code 1 if kvpact must not serve on this GPU, or if there is none.
    """
    del gpu  # nothing else can be tested yet
    from kvpact.cli.doctor import examine_gpu

    if not examine_gpu(device, output, as_json=json):
        raise typer.Exit(1)


def main() -> None:
    """Console script."""
    if sys.platform != "linux":
        print(f"kvpact: kvpact runs on Linux only, not on {sys.platform}", file=sys.stderr)
        sys.exit(2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # characters it cannot encode, such as a model's name, are escaped
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="kvpact")
