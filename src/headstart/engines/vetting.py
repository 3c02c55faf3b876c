"""Before another engine is started: would it work? What the adviser knows is said before a model is loaded."""

from __future__ import annotations

from headstart.advise.check import STOP, WARN, Pair, check
from headstart.advise.facts import Facts, look
from headstart.engines import vllm
from headstart.engines.launching import Order
from headstart.errors import ConfigError, ModelError
from headstart.progress import note

UNPADDED = "use_heterogeneous_vocab"  # vLLM's own key: then it maps vocabularies
DRAFTS = (
    "draft_model",
    "eagle",
    "eagle3",
    "peagle",
    "medusa",
    "mlp_speculator",
)  # methods whose model is one that we can read


def vet(engine: str, order: Order, capability: float | None = None) -> None:
    """A reason that it cannot work is an error; one that it will not work well is said."""
    target = _look(engine, order.model)
    if target is None:
        note(f"{order.model} is not on this machine, so whether {engine} can run it was not checked.")
        return
    report = check(Pair(target, _draft(engine, order), capability))
    found = [*report.common, *next(v.findings for v in report.verdicts if v.engine == engine)]
    if stops := [finding.text for finding in found if finding.level == STOP]:
        raise ConfigError(f"--engine {engine} cannot serve this: {' '.join(stops)}")
    for finding in found:
        if finding.level == WARN:
            note(f"{engine}: {finding.text}")


def _draft(engine: str, order: Order) -> Facts | None:
    config = order.method.config
    if not config.get("model") or config.get("method") not in DRAFTS or config.get(UNPADDED):
        return None
    return _look(engine, str(config["model"]))


def _look(engine: str, name: str) -> Facts | None:
    """None: a hub's, which the engine fetches by itself. vLLM gets GGUF files as the folders they are converted to."""
    own = vllm.folder(name) if engine == "vllm" else name
    try:
        return look(own)
    except ModelError as error:
        if "not in the local hub cache" in str(error):
            return None
        raise
