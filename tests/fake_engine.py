"""A server with OpenAI's API that pretends: `python fake_engine.py --port N ...`. It needs nothing and starts at once.

FAKE_ENGINE says what goes wrong: `ends TEXT`, `hangs` (is never ready), `stays` (does not listen), `dies`. So do prompts:
`wrong` (refused in a shape of its own), `endless` (words until the client leaves), `last words` (it ends between two of them).
Answers that are no streams tell what was asked. With --headless there is no server, as on vLLM's other machines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WORDS = ("one", " two", " three", " four")
wrong, _, text = os.environ.get("FAKE_ENGINE", "").partition(" ")
key = os.environ.get("VLLM_API_KEY")
made = 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/health":
            return self._send(b"{}", 503 if wrong == "hangs" else 200)
        if self.path == "/v1/models":
            return self._send(json.dumps({"data": [{"id": "fake"}]}).encode())
        if self.path != "/metrics":
            return self._send(b'{"detail": "Not Found"}', 404)
        lines = [f"vllm:spec_decode_num_drafts_total {made}", f"vllm:spec_decode_num_draft_tokens_total {3 * made}"]
        lines += [f"vllm:spec_decode_num_accepted_tokens_total {made}"]
        lines += ["# TYPE vllm:num_requests_running gauge", 'vllm:num_requests_running{engine="0"} 2']
        lines += ["# TYPE vllm:its_own gauge", "vllm:its_own 7", "# TYPE process_open_fds gauge", "process_open_fds 3"]
        self._send("\n".join(lines).encode() + b"\n")

    def do_POST(self) -> None:
        global made
        body = json.loads(self.rfile.read(int(self.headers["content-length"] or 0)) or b"{}")
        if self.path == "/reset_prefix_cache":
            return self._send(b"")
        if self.path.startswith("/v1/") and key and self.headers["authorization"] != f"Bearer {key}":
            return self._send(b'{"error": "Unauthorized"}', 401)
        if wrong == "dies":
            print("torch.OutOfMemoryError: CUDA out of memory.", flush=True)
            os._exit(1)
        if self.path.partition("?")[0] not in ("/v1/completions", "/v1/chat/completions"):
            return self._send(b'{"detail": "Not Found"}', 404)
        made += 2
        self._answer(body)

    def _answer(self, body: dict) -> None:
        prompt = body.get("prompt")
        if prompt == "wrong":
            return self._send(b'{"object": "error", "message": "That is wrong."}', 422)
        if prompt in ("endless", "last words"):
            return self._endless(prompt == "last words")
        usage = {"completion_tokens": len(WORDS), "prompt_tokens": len(str(prompt or body.get("messages")))}
        if not body.get("stream"):
            told = {"path": self.path, "body": body, "id": self.headers["x-request-id"], "usage": usage}
            choice = {"text": "".join(WORDS), "finish_reason": "stop"}
            return self._send(json.dumps(told | {"choices": [choice]}).encode())
        events = [{"choices": [{"text": word}]} for word in WORDS]
        events.append({"choices": [], "usage": usage, "timings": {"draft_n": 6, "draft_n_accepted": 2}})
        stream = b"".join(f"data: {json.dumps(e)}\n\n".encode() for e in events) + b"data: [DONE]\n\n"
        self._send(stream, kind="text/event-stream; charset=utf-8")

    def _endless(self, dies: bool) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        try:
            for number in range(10_000):
                event = f"data: {json.dumps({'choices': [{'text': f' {number}'}]})}\n\n".encode()
                self.wfile.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
                if dies and number:
                    print("torch.OutOfMemoryError: CUDA out of memory.", flush=True)
                    os._exit(1)
                time.sleep(0.02)
        except OSError:
            print("the client has left", flush=True)

    def _send(self, content: bytes, code: int = 200, kind: str = "application/json") -> None:
        self.send_response(code)
        self.send_header("content-type", kind)
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
    if "--headless" in sys.argv:
        time.sleep(600)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.serve_forever()
