"""A small real HTTP server that speaks the chat API and fails as it is told to."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, dict[str, Any] | bytes]


def completion(content: str, **choice: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop", **choice}]}


@dataclass
class Chat:
    """What the server saw, and what it says to the n-th request of one last user turn."""

    reply: Callable[[dict[str, Any], int], Reply]
    models: list[str] = field(default_factory=lambda: ["tiny"])
    listing: dict[str, Any] | None = None
    """Said of the models instead of their names in the usual form."""
    takes_token_ids: bool = False
    seen: Counter[str] = field(default_factory=Counter)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    """What every request showed to be let in."""
    in_work: int = 0
    most_in_work: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, body: dict[str, Any]) -> Reply:
        if "return_token_ids" in body and not self.takes_token_ids:
            return 422, {"detail": "Unexpected fields in the request: {'return_token_ids'}"}
        if body["max_tokens"] == 1:
            return 200, completion("Hi", token_ids=[7]) | {"prompt_token_ids": [1]}
        asked = body["messages"][-1]["content"]
        with self.lock:
            self.seen[asked] += 1
            self.bodies.append(body)
            self.in_work += 1
            self.most_in_work = max(self.most_in_work, self.in_work)
        try:
            return self.reply(body, self.seen[asked])
        finally:
            with self.lock:
                self.in_work -= 1


@contextmanager
def serving(chat: Chat) -> Iterator[str]:
    """Serve on a free port; gives the base URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, chat.listing or {"data": [{"id": name} for name in chat.models]})

        def do_POST(self) -> None:
            chat.keys.append(self.headers["Authorization"])
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(*chat.answer(body))

        def _send(self, status: int, reply: dict[str, Any] | bytes) -> None:
            data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            if status == 429:
                self.send_header("Retry-After", "0")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
