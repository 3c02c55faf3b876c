"""A thread that steps the engine while there is work. Everyone else submits, listens and cancels from outside.

Everything that touches the engine happens on this thread, so the engine needs no locks and Ctrl-C in the caller never
cuts a forward in two.

A step that breaks is the engine's own affair. Where something breaks between steps, the engine is started again: who ran is
told why that ends, who waits is kept. Where that happens again and again, everybody is told, and `health` says so.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from headstart.core import Chunk, Request
from headstart.engine import Engine, StepFailed
from headstart.errors import RequestFailed

Listener = Callable[[Request, Chunk | BaseException], None]
log = logging.getLogger("headstart.engine")
PATIENCE, WITHIN = 5, 60.0  # restarts that are tried, within so many seconds
YOUNG = 10_000  # objects that may come to stay before the collector looks: in a step with 64 requests some thousands do


@contextmanager
def calm_collector() -> Iterator[None]:
    """Or it stops the engine now and then to look at every object that a model consists of, and in every step at those that are
    about to go."""
    gc.freeze()
    often = gc.get_threshold()
    if often[0] < YOUNG:
        gc.set_threshold(YOUNG, *often[1:])
    try:
        yield
    finally:
        gc.set_threshold(*often)
        gc.unfreeze()


@dataclass
class Health:
    alive: bool = True
    restarts: int = 0
    last_error: str | None = None


class EngineLoop:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._wake = threading.Condition()
        self._inbox: list[tuple[list[Request], Listener]] = []
        self._cancelled: list[Request] = []
        self._errands: list[tuple[Callable[[], None], Future[None]]] = []
        self._ending: BaseException | None = None  # what all that runs and waits is to be told
        self._listeners: dict[str, tuple[Request, Listener]] = {}
        self._closing = False
        self._thread: threading.Thread | None = None
        self._broke: list[float] = []  # when something did, lately
        self.between: Callable[[], None] = lambda: None  # what a step brought was told, and no device works meanwhile
        self.health = Health()

    def submit(self, requests: Sequence[Request], listener: Listener) -> None:
        """Hand in requests; they enter the engine together. The listener is called on the loop's thread."""
        with self._wake:
            if self._closing:
                raise RequestFailed("This LLM was closed.")
            self._inbox.append((list(requests), listener))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="headstart-engine", daemon=True)
                self._thread.start()
            self._wake.notify()

    def cancel(self, requests: Sequence[Request]) -> None:
        with self._wake:
            self._cancelled.extend(requests)
            self._wake.notify()

    def end_all(self, error: BaseException) -> None:
        """All that runs or waits ends with this. Who comes later is served."""
        with self._wake:
            self._ending = error
            self._wake.notify()

    def do(self, errand: Callable[[], None]) -> None:
        """Between two steps, and wait until it is done."""
        done: Future[None] = Future()
        with self._wake:
            alone = self._thread is None or self._closing
            if not alone:
                self._errands.append((errand, done))
                self._wake.notify()
        if alone:
            errand()
        else:
            done.result()

    def close(self) -> None:
        """Stop after the step in progress; what still runs is aborted."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=60)
        elif self._thread is None:
            self.engine.close()

    # ------------------------------------------------------------------ on the thread
    def _run(self) -> None:
        with calm_collector():
            self._serve_all()

    def _serve_all(self) -> None:
        try:
            while self._serve():
                pass
            self._fail(None, RequestFailed("The LLM was closed while this request ran."))
        except Exception as error:  # it cannot go on, and nobody may wait for it
            self.health.alive, self.health.last_error = False, type(error).__name__
            self._fail(None, error)
        finally:
            self._refuse_inbox()
            self.engine.close()

    def _serve(self) -> bool:
        """Step until it is time to stop; True where something broke, and all begins anew."""
        try:
            while self._next():
                self._step()
            return False
        except Exception as error:
            now = time.monotonic()
            self._broke = [*(t for t in self._broke if now - t < WITHIN), now]
            if len(self._broke) > PATIENCE:
                raise
            log.error("the engine broke between steps and is started again: %s", error, exc_info=error)
            self.health.restarts, self.health.last_error = self.health.restarts + 1, type(error).__name__
            for request in self.engine.restart():
                self._end(request, error)
            return True

    def _step(self) -> None:
        if self.engine.idle:
            return
        try:
            chunks = self.engine.step()
        except StepFailed as failure:
            self._fail(failure.requests, failure.__cause__ or failure)
            return
        for request, event in chunks:
            if isinstance(event, Exception):
                self._fail([request], event)
            else:
                self._deliver(request, event)
        if chunks and not self.engine.in_flight:
            self.between()

    def _refuse_inbox(self) -> None:
        with self._wake:
            self._closing = True
            inbox, self._inbox = self._inbox, []
            errands, self._errands = self._errands, []
        for requests, listener in inbox:
            for request in requests:
                _tell(listener, request, RequestFailed("This LLM was closed."))
        for _, done in errands:
            done.set_exception(RequestFailed("This LLM was closed."))

    def _next(self) -> bool:
        """Take in what came, sleep when there is nothing; False when it is time to stop."""
        with self._wake:
            while not self._has_work() and self.engine.idle:
                self._wake.wait()
            inbox, self._inbox = self._inbox, []
            cancelled, self._cancelled = self._cancelled, []
            closing, ending, self._ending = self._closing, self._ending, None
            errands, self._errands = self._errands, []
        for errand, done in errands:
            _run_errand(errand, done)
        for requests, listener in inbox:
            self._take_in(requests, listener)
        for request in cancelled:
            if request.finish_reason is None:
                self.engine.abort(request)
                self._deliver(request, Chunk("", [], [], finish_reason="abort"))
        if ending is not None:
            self._fail(None, ending)
        return not closing

    def _has_work(self) -> bool:
        return bool(self._inbox or self._cancelled or self._closing or self._ending or self._errands)

    def _take_in(self, requests: list[Request], listener: Listener) -> None:
        for request in requests:
            try:
                self.engine.add(request)
                self._listeners[request.id] = (request, listener)
            except Exception as error:
                _tell(listener, request, error)

    def _deliver(self, request: Request, chunk: Chunk) -> None:
        entry = self._listeners.get(request.id)
        if entry is None:
            return
        heard = _tell(entry[1], request, chunk)
        if not heard:
            self.engine.abort(request)
        if not heard or chunk.finish_reason is not None:
            del self._listeners[request.id]

    def _fail(self, requests: Sequence[Request] | None, error: BaseException) -> None:
        """These requests (None: all) cannot go on, and are told why. The others do not notice."""
        failed = [r for r, _ in self._listeners.values()] if requests is None else requests
        for request in failed:
            self.engine.abort(request)
            self._end(request, error)

    def _end(self, request: Request, error: BaseException) -> None:
        entry = self._listeners.pop(request.id, None)
        if entry is not None:
            _tell(entry[1], request, error)


def _tell(listener: Listener, request: Request, event: Chunk | BaseException) -> bool:
    """False when nobody listens any more: an event loop that was closed, a caller that broke."""
    try:
        listener(request, event)
        return True
    except Exception:
        return False


def _run_errand(errand: Callable[[], None], done: Future[None]) -> None:
    try:
        errand()
        done.set_result(None)
    except Exception as error:
        done.set_exception(error)
