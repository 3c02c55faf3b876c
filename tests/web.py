"""Requests with patience: a machine that is busy with other tests may take seconds for what takes milliseconds."""

from functools import partial

import httpx

PATIENCE = 120.0  # seconds
get, post = partial(httpx.get, timeout=PATIENCE), partial(httpx.post, timeout=PATIENCE)
