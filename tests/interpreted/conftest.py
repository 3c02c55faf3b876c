"""Kernels in Triton's interpreter, on one thread of the CPU.

Nothing here is collected unless TRITON_INTERPRET=1: the variable decides which runner an engine gets, so it may not be
set for the other tests. `tests/test_interpreted.py` runs these files in processes of their own.
"""

import contextlib
import dataclasses
import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]
torch.set_num_threads(1)


def _hurry() -> None:
    """Patch the language once for each launch, not for each call inside it, and leave out overflow checks."""
    from triton.runtime import interpreter

    patch, launch, done = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()
    unchecked = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)

    def patch_once(function):
        home = id(function.__globals__)
        if home in done:
            return None
        done.add(home)
        return patch(function)

    def launch_anew(self, *args, **kwargs):
        done.clear()
        return launch(self, *args, **kwargs)

    interpreter.interpreter_builder.options = unchecked
    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew


if INTERPRETED:
    with contextlib.suppress(ImportError, AttributeError, TypeError):  # another Triton may look different: just slower
        _hurry()
