"""Serve until somebody says stop; then let what runs come to its end, within a stated time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI

from headstart.errors import ConfigError

log = logging.getLogger("headstart.server")
SWITCH = 0.0005  # seconds for which the engine's thread may keep the interpreter while tokens wait to be sent
LAST_WORDS = 5  # seconds for telling those that are not done


@dataclass(frozen=True)
class Address:
    host: str = "127.0.0.1"
    port: int = 8000
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    root_path: str = ""

    @property
    def url(self) -> str:
        return f"http{'s' if self.ssl_certfile else ''}://{self.host}:{self.port}{self.root_path}"

    def bind(self) -> socket.socket:
        """A socket that is ours, and does not listen yet."""
        if self.ssl_certfile or self.ssl_keyfile:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.ssl_certfile or "", self.ssl_keyfile)
            except OSError as error:  # ssl.SSLError is one
                raise ConfigError(f"--ssl-certfile and --ssl-keyfile cannot be used: {error}.") from error
        door = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET)
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind((self.host, self.port))
        except (OSError, OverflowError) as error:
            door.close()
            why = getattr(error, "strerror", None) or "a port is a number from 0 to 65535"
            raise ConfigError(f"{self.host}:{self.port} cannot be served: {why}. See --host and --port.") from error
        return door


class Server(uvicorn.Server):
    """Takes nothing new on once it is told to stop, and gives what runs some seconds. What is not done then is told so."""

    def __init__(self, config: uvicorn.Config, drain: float = 30.0) -> None:
        super().__init__(config)
        self.drain = drain
        if isinstance(config.app, FastAPI):
            config.app.state.stop = self.stop
        sys.setswitchinterval(SWITCH)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state = self.config.app.state if isinstance(self.config.app, FastAPI) else None
        if state is None:
            await super().shutdown(sockets)
            return
        state.gate.closing = True
        overdue = asyncio.get_running_loop().call_later(self.drain, state.give_up)
        await super().shutdown(sockets)
        overdue.cancel()

    def stop(self) -> None:
        """As a signal would say it; from any thread."""
        if isinstance(self.config.app, FastAPI):
            self.config.app.state.gate.closing = True
        self.should_exit = True

    def handle_exit(self, sig: int, frame: Any) -> None:
        app = self.config.app
        if isinstance(app, FastAPI):
            app.state.gate.closing = True
        super().handle_exit(sig, frame)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn does, but without raising the signal once more at the end: the caller has things to put away."""
        if threading.current_thread() is not threading.main_thread():  # who runs it there ends it, too
            yield
            return
        before = {s: signal.signal(s, self.handle_exit) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for s, handler in before.items():
                signal.signal(s, handler)


@contextlib.contextmanager
def on_thread(app: FastAPI, drain: float = 2.0, log_level: str = "error") -> Iterator[tuple[Server, str]]:
    """A server on a thread of this process, at any free port of localhost, and its URL. At the end it is told to stop."""
    config = uvicorn.Config(
        app, port=0, log_level=log_level, access_log=False, lifespan="off",
        timeout_graceful_shutdown=math.ceil(drain) + LAST_WORDS,
    )  # fmt: skip
    server = Server(config, drain)
    thread = threading.Thread(target=server.run, name="headstart-server", daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield server, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(drain + 2 * LAST_WORDS)
        assert not thread.is_alive(), "the server did not stop"


def serve(app: FastAPI, address: Address, door: socket.socket, drain: float = 30.0, log_level: str = "warning") -> None:
    """What is logged goes wherever the caller has set that up."""
    config = uvicorn.Config(
        app, address.host, address.port, log_level=log_level, log_config=None, access_log=False,
        timeout_graceful_shutdown=math.ceil(drain) + LAST_WORDS, ssl_certfile=address.ssl_certfile,
        ssl_keyfile=address.ssl_keyfile, root_path=address.root_path, lifespan="off",
    )  # fmt: skip
    log.info("listening at %s", address.url)
    Server(config, drain).run(sockets=[door])
