"""`headstart serve`: an OpenAI-compatible server. Flags, environment and a file say the same things by the same names."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart.cli import elsewhere
from headstart.cli.elsewhere import HERE, OtherOptions
from headstart.cli.groups import expand
from headstart.cli.options import EngineOptions, Quiet, SpeculationOptions, option, parse_bytes, read_file
from headstart.errors import BadInput, ConfigError, nearest
from headstart.progress import note, set_quiet

if TYPE_CHECKING:
    from headstart.server.app import ServerSettings
    from headstart.server.run import Address
    from headstart.server.tracing import Tracing

SERVER, LIMITS, SAFETY = "Server", "Limits", "Security"
LEVELS = ("debug", "info", "warning", "error")
SECRET = ("api_key",)
OWN = ("config", "show_config", "print_grafana", "help")  # that no file sets


def _read_config(ctx: typer.Context, path: str | None) -> str | None:
    """What the file says stands for the defaults, so that flags and the environment go before it."""
    if path is not None:
        known = [p.name for p in ctx.command.params if p.name and p.name not in OWN]
        ctx.default_map = read_config(Path(path), known)
    return path


def read_config(path: Path, known: Sequence[str]) -> dict[str, Any]:
    """A TOML or YAML file with one value for each option, by its name."""
    text = read_file("--config", path)
    try:
        found = _parse(path, text)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(
            f"--config {path} is not valid {path.suffix[1:].upper()}: {str(error).splitlines()[0]}"
        ) from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"--config {path} should hold names and values, such as port: 8000.")
    out: dict[str, Any] = {}
    for key, value in found.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"--config {path}: unknown option {key!r}.{nearest(name, known)}")
        out[name] = json.dumps(value) if isinstance(value, Mapping) else value
    return out


def _parse(path: Path, text: str) -> Any:
    if path.suffix == ".toml":
        import tomllib

        return tomllib.loads(text)
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--config {path} should end in .toml, .yaml or .yml.")
    import yaml

    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


@dataclass(frozen=True)
class ServerOptions:
    host: Annotated[str, option("--host", help="Address to listen on; 0.0.0.0 is all of them.", panel=SERVER)] = (
        "127.0.0.1"
    )
    port: Annotated[int, option("--port", "-p", help="Port to listen on.", panel=SERVER)] = 8000
    served_model_name: Annotated[
        str | None,
        option(
            "--served-model-name", help="Name under which clients ask for the model. [default: its own]", panel=SERVER
        ),
    ] = None
    root_path: Annotated[str, option("--root-path", help="Path that a proxy in front takes away.", panel=SERVER)] = ""
    drain: Annotated[
        float, option("--drain", help="Seconds that what runs may take when the server is told to stop.", panel=SERVER)
    ] = 30.0
    log_level: Annotated[str, option("--log-level", help="debug, info, warning or error.", panel=SERVER)] = "warning"
    log_format: Annotated[str, option("--log-format", help="text, or json: one object on each line.", panel=SERVER)] = (
        "text"
    )
    otlp_endpoint: Annotated[
        str | None,
        option(
            "--otlp-endpoint",
            help="OpenTelemetry collector that gets a span for each request: http://localhost:4318. [default: none]",
            panel=SERVER,
        ),
    ] = None
    metrics_prefix: Annotated[
        str,
        option(
            "--metrics-prefix", help="What metrics' names begin with: vllm, for dashboards that exist.", panel=SERVER
        ),
    ] = "headstart"
    max_num_seqs: Annotated[int, option("--max-num-seqs", help="Requests that run at once.", panel=LIMITS)] = 32
    max_batch_tokens: Annotated[int, option("--max-batch-tokens", help="New tokens in one forward.", panel=LIMITS)] = (
        512
    )
    max_queue: Annotated[
        int, option("--max-queue", help="Requests that may wait; more are turned away with 429.", panel=LIMITS)
    ] = 256
    max_prompt_tokens: Annotated[
        int | None, option("--max-prompt-tokens", help="Longest prompt. [default: what fits]", panel=LIMITS)
    ] = None
    max_output_tokens: Annotated[
        int | None, option("--max-output-tokens", help="Longest answer. [default: what fits]", panel=LIMITS)
    ] = None
    max_body: Annotated[str, option("--max-body", help="Largest body of a request: 4MB.", panel=LIMITS)] = "4MiB"
    api_key: Annotated[
        list[str] | None,
        option(
            "--api-key",
            help="Key that clients must send; repeatable. Better in a file or the environment.",
            panel=SAFETY,
        ),
    ] = None
    api_key_file: Annotated[
        str | None, option("--api-key-file", help="File with one key on each line.", panel=SAFETY)
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        option("--cors-origin", help="Web page that may ask from a browser; repeatable. [default: none]", panel=SAFETY),
    ] = None
    ssl_certfile: Annotated[str | None, option("--ssl-certfile", help="Certificate, for https.", panel=SAFETY)] = None
    ssl_keyfile: Annotated[str | None, option("--ssl-keyfile", help="Its private key.", panel=SAFETY)] = None

    def keys(self) -> list[str]:
        found = list(self.api_key or [])
        if self.api_key_file is not None:
            lines = read_file("--api-key-file", self.api_key_file).splitlines()
            found += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
            if not found:
                raise ConfigError(f"--api-key-file {self.api_key_file} holds no key: write one on each line.")
        if any(not key.strip() for key in found):
            raise BadInput("An empty --api-key would let everybody in: leave it out, or give a key.")
        return found


@expand
def serve(
    ctx: typer.Context,
    engine: EngineOptions,
    speculation: SpeculationOptions,
    server: ServerOptions,
    other: OtherOptions,
    target: Annotated[
        str | None, typer.Argument(help="The model, as --model.", show_default=False, metavar="MODEL")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option("--config", help="TOML or YAML file with these options.", callback=_read_config, is_eager=True),
    ] = None,
    show_config: Annotated[
        bool, option("--show-config", help="Print the options as they are resolved, and leave.")
    ] = False,
    print_grafana: Annotated[
        bool, option("--print-grafana", help="Print a Grafana dashboard for this server's metrics, and leave.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Serve a model with OpenAI's API.

    Clients use http://localhost:8000/v1 as their base URL. Options come from flags, else from environment variables
    (HEADSTART_SERVE_PORT=8001), else from the file that --config names. With --engine, vLLM, llama.cpp or TabbyAPI
    computes, behind the same door.

    Example: `headstart serve smollm2 --port 8001`, then
    `curl localhost:8001/v1/completions --json '{"prompt": "Once upon a time"}'`; or
    `headstart serve my-70b --engine vllm --drafter eagle3 --draft-model my-head --tensor-parallel-size 4`
    """
    set_quiet(quiet or server.log_format == "json")  # who reads objects wants nothing between them
    if show_config:
        print(_resolved(ctx), end="")
        return
    if print_grafana:
        print(dashboard(server.metrics_prefix), end="")
        return
    try:
        from headstart.server.app import ServerSettings, create_app
        from headstart.server.logs import FORMS
        from headstart.server.run import serve as run
    except ImportError as error:
        raise ConfigError(f"headstart serve needs {error.name}: pip install 'headstart[serve]'.") from error
    engine = replace(engine, model=target) if target is not None else engine
    if server.log_level not in LEVELS:
        raise BadInput(f"--log-level {server.log_level!r} is not known: {', '.join(LEVELS)}.")
    if server.log_format not in FORMS:
        raise BadInput(f"--log-format {server.log_format!r} is not known: {', '.join(FORMS)}.")
    said = _said(ctx)
    other.check(said)
    keys = server.keys()
    settings = ServerSettings(
        server.served_model_name or os.path.basename(engine.model.rstrip("/")) or engine.model,
        keys,
        server.max_queue,
        parse_bytes(server.max_body, "--max-body"),
        server.max_prompt_tokens,
        server.max_output_tokens,
        server.cors_origin or (),
        server.metrics_prefix,
    )
    if other.engine != HERE:
        _elsewhere(engine, speculation, server, other, settings, said)
        return
    spec = speculation.config()
    address, door = _door(server)
    with contextlib.ExitStack() as held:
        tracing = _telling(held, server, settings.name)
        llm = held.enter_context(
            engine.open(spec, max_num_seqs=server.max_num_seqs, max_batch_tokens=server.max_batch_tokens)
        )
        note(f"Serving {settings.name} at {address.url}/v1. Ctrl-C ends.")
        run(create_app(llm, settings, tracing), address, door, server.drain, server.log_level)


def _elsewhere(
    engine: EngineOptions,
    speculation: SpeculationOptions,
    server: ServerOptions,
    other: OtherOptions,
    settings: ServerSettings,
    said: set[str],
) -> None:
    """Another engine computes. A machine of a rank above 0 has no door."""
    address, door = (None, None) if other.headless else _door(server)
    try:
        order = elsewhere.order(
            engine, speculation, other, settings.name, said, server.max_num_seqs, server.max_batch_tokens
        )
        made = elsewhere.launch(order, other)
    except ImportError as error:
        needs = f"headstart serve --engine needs {error.name}"
        raise ConfigError(f"{needs}: pip install 'headstart[serve,bench]'.") from error
    with contextlib.ExitStack() as held:
        tracing = _telling(held, server, settings.name)
        if address is None or door is None:
            elsewhere.work_there(made, other)
        else:
            elsewhere.serve_there(made, other, order, settings, address, door, server.drain, server.log_level, tracing)


def _said(ctx: typer.Context) -> set[str]:
    """Names of the options that somebody has set: by a flag, in the environment or in a file."""
    names = [p.name for p in ctx.command.params if p.name]
    return {name for name in names if getattr(ctx.get_parameter_source(name), "name", "DEFAULT") != "DEFAULT"}


def _door(server: ServerOptions) -> tuple[Address, socket.socket]:
    """What is wrong with it is said before a model is loaded."""
    from headstart.server.run import Address

    address = Address(server.host, server.port, server.ssl_certfile, server.ssl_keyfile, server.root_path)
    door = address.bind()
    return replace(address, port=door.getsockname()[1]), door  # 0: any that is free


def _telling(held: contextlib.ExitStack, server: ServerOptions, name: str) -> Tracing | None:
    """Logs, and spans where they are wanted."""
    from headstart.server.logs import written
    from headstart.server.tracing import Tracing

    held.enter_context(written(server.log_level, server.log_format))
    if server.otlp_endpoint is None:
        return None
    return held.enter_context(contextlib.closing(Tracing.to(server.otlp_endpoint, name)))


def dashboard(prefix: str) -> str:
    """For Grafana, with metrics under the prefix that they are served under."""
    text = resources.files("headstart.server").joinpath("grafana.json").read_text(encoding="utf-8")
    return text.replace("headstart:", f"{prefix}:")


def _resolved(ctx: typer.Context) -> str:
    """As a YAML file that --config reads; without keys."""
    import yaml

    names = [p.name for p in ctx.command.params if p.name and p.name not in (*OWN, *SECRET)]
    shown = {name: ctx.params[name] for name in names if ctx.params.get(name) is not None}
    return yaml.safe_dump(shown, sort_keys=False)
