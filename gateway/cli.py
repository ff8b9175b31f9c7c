"""The command `warmgate`: serve, engine, check, doctor, lint, purge, version. Errors: a sentence each, exit code 2."""

import asyncio
import json
import os
import sys
import time
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.config import ConfigError, load_config
from gateway.config.units import parse_time
from gateway.lint import findings_text, lint_file
from gateway.remote import KEY_VARIABLE, Problem, ask, base_url
from gateway.sentinels.doctor import prescription
from gateway.source import Source, missing_tokenizers, shortcomings
from gateway.supervisor import StartError, Supervisor, engine_command, say
from gateway.supervisor.greeting import overview

DEFAULT_FILE = Path("warmgate.yaml")

app = typer.Typer(
    help="Warmgate: a prefix and response caching gateway for LLMs. Nothing is computed twice.",
    epilog="Settings come from warmgate.yaml, WARMGATE_SECTION__KEY variables over it, and flags over both.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _tell_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def common(
    _: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_tell_version, help="Print the version, and exit.")
    ] = False,
) -> None:
    pass


ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Configuration file (default: ./warmgate.yaml where there is one)."),
]


UrlOption = Annotated[
    str | None, typer.Option(help="The running gateway (default: where the configuration has it listen).")
]
KeyOption = Annotated[
    str | None, typer.Option("--admin-key", envvar=KEY_VARIABLE, help="Admin key, where the gateway asks for one.")
]


@app.command()
def serve(
    config: ConfigOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (0: any free one).")] = None,
    workers: Annotated[int | None, typer.Option(help="Number of gateway processes.")] = None,
    no_engine: Annotated[bool, typer.Option("--no-engine", help="Do not start the embedded engine.")] = False,
) -> None:
    """Run the gateway, and the embedded engine.

    SIGTERM or Ctrl-C finishes the open requests and ends; SIGHUP reads the configuration again.
    """
    listen = {"host": host, "port": port, "workers": workers}
    source = _source(config, {"listen": listen, "engine": "off" if no_engine else None})

    async def run() -> None:
        await Supervisor(source).run()

    asyncio.run(run())


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def engine(context: typer.Context) -> None:
    """Run the embedded engine alone.

    Every argument is the engine's own (see `warmgate engine --help`).
    """
    command, environment = engine_command()
    os.execve(command[0], [*command, *context.args], environment)


@app.command()
def check(config: ConfigOption = None) -> None:
    """Check the configuration, and say what it would run."""
    source = _source(config, {})
    found = load_config(source.path, os.environ, source.flags)
    typer.echo(overview(found))
    if faults := [*shortcomings(found), *missing_tokenizers(found)]:
        raise ConfigError(faults)
    typer.echo("The configuration is good.")


@app.command()
def purge(
    key: Annotated[str | None, typer.Option(help="Forget one answer, by its key.")] = None,
    tag: Annotated[str | None, typer.Option(help="Forget every answer with this tag.")] = None,
    model: Annotated[str | None, typer.Option(help="Forget every answer of this model.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Forget every answer of this tenant.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Forget this namespace (of --tenant, or 'default').")] = None,
    before: Annotated[str | None, typer.Option(help="Forget what is older: 1h, 7d, or 2026-11-01T12:00.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Forget everything.")] = False,
    soft: Annotated[bool, typer.Option("--soft", help="Mark as stale instead of forgetting.")] = False,
    url: UrlOption = None,
    config: ConfigOption = None,
    admin_key: KeyOption = None,
) -> None:
    """Make a running gateway forget answers."""
    named = {
        "key": key,
        "tag": tag,
        "model": model,
        "tenant": tenant,
        "namespace": namespace,
        "all": everything or None,
    }
    chosen: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if before is not None:
        chosen["before"] = _moment(before)
    if len(chosen) != 1 and chosen.keys() != {"namespace", "tenant"}:
        raise Problem(
            "say what to forget by exactly one of --key, --tag, --model, --tenant, --namespace, --before, --all"
        )
    base = base_url(url, _source(config, {}).path)
    answer = ask(f"{base}/admin/purge", admin_key, {**chosen, "soft": soft})
    typer.echo(json.dumps(answer))
    if not answer.get("everywhere", True):
        raise Problem("forgotten here, but workers and gateways beside this one may not have heard of it; try again")


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    url: UrlOption = None,
    config: ConfigOption = None,
    admin_key: KeyOption = None,
) -> None:
    """Look for silent failures in a running gateway.

    Exit code 1: something is red. Every light is explained in docs/sentinels.md.
    """
    base = base_url(url, _source(config, {}).path)
    report = ask(f"{base}/admin/sentinels", admin_key)
    typer.echo(json.dumps(report, indent=2) if as_json else prescription(report, time.time()))
    if report["state"] == "red":
        sys.exit(1)


@app.command()
def lint(
    prompts: Annotated[Path, typer.Argument(help="JSON lines: request bodies, in the order in which they are sent.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Find what keeps prompts from sharing their beginnings.

    Exit code 1: there is something to mend.
    """
    found = lint_file(prompts)
    typer.echo(json.dumps(found, indent=2) if as_json else findings_text(found))
    if found["findings"]:
        sys.exit(1)


@app.command()
def version() -> None:
    """Print the version."""
    try:
        typer.echo(f"warmgate {metadata.version('warmgate')}")
    except metadata.PackageNotFoundError:
        typer.echo("warmgate (not installed)")


def main() -> None:
    """The command line; whatever goes wrong becomes a sentence a fault, and exit code 2."""
    try:
        app(prog_name="warmgate")
        return
    except ConfigError as error:
        sentences = error.messages
    except StartError as error:
        sentences = [] if error.told else [str(error)]
    except Problem as error:
        sentences = [str(error)]
    for sentence in sentences:
        say(sentence)
    sys.exit(2)


def _source(path: Path | None, flags: dict[str, Any]) -> Source:
    if path is None and DEFAULT_FILE.is_file():
        path = DEFAULT_FILE
    return Source(path and path.absolute(), flags)


def _moment(text: str) -> float:
    """Unix seconds: an age counts back from now."""
    try:
        return time.time() - parse_time(text)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise Problem(f"--before must be an age such as 1h or a date such as 2026-11-01T12:00, not '{text}'") from None


if __name__ == "__main__":
    main()
