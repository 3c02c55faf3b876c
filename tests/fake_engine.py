"""A server with OpenAI's API that pretends: `python fake_engine.py --port N ...`. It needs nothing and starts at once.
FAKE_ENGINE says what goes wrong: `ends TEXT`, `hangs` (is never ready), `stays` (does not listen), `dies`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WORDS = ("one", " two", " three", " four")
wrong, _, text = os.environ.get("FAKE_ENGINE", "").partition(" ")
made = 0


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/health":
            return self._send(b"{}", 503 if wrong == "hangs" else 200)
        if self.path == "/v1/models":
            return self._send(json.dumps({"data": [{"id": "fake"}]}).encode())
        lines = [f"vllm:spec_decode_num_drafts_total {made}", f"vllm:spec_decode_num_draft_tokens_total {3 * made}"]
        lines += [f"vllm:spec_decode_num_accepted_tokens_total {made}"]
        self._send("\n".join(lines).encode() + b"\n")

    def do_POST(self) -> None:
        global made
        body = json.loads(self.rfile.read(int(self.headers["content-length"] or 0)) or b"{}")
        if self.path == "/reset_prefix_cache":
            return self._send(b"")
        if wrong == "dies":
            print("torch.OutOfMemoryError: CUDA out of memory.", flush=True)
            os._exit(1)
        made += 2
        events = [{"choices": [{"text": word}]} for word in WORDS]
        usage = {"completion_tokens": len(WORDS), "prompt_tokens": len(str(body.get("prompt") or body.get("messages")))}
        events.append({"choices": [], "usage": usage, "timings": {"draft_n": 6, "draft_n_accepted": 2}})
        self._send(b"".join(f"data: {json.dumps(e)}\n\n".encode() for e in events) + b"data: [DONE]\n\n")

    def _send(self, content: bytes, code: int = 200) -> None:
        self.send_response(code)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Quietly."""


if __name__ == "__main__":
    if wrong == "ends":
        print(text, flush=True)
        sys.exit(3)
    if wrong == "stays":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # it has a family
    print("child", child.pid, json.dumps(sys.argv[1:]), flush=True)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.serve_forever()
