"""Answers from any OpenAI-compatible server: bounded concurrency, retries with back-off, the server's words."""

from __future__ import annotations

import http.client
import json
import os
import queue
import random
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from draftline.data.dialogue import Answer, Dialogue
from draftline.data.options import ServerOptions
from draftline.data.sampling import Sampling
from draftline.errors import ConfigError, ServerError

_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
T = TypeVar("T")
U = TypeVar("U")
_WORDS = 500
"""Characters of a server's reply that an error shows."""
_KEY = re.compile(r"[ -~]+")
"""What a header can carry: ASCII without control characters."""


class RequestFailedError(Exception):
    """One request that gave no answer, with the server's words."""

    def __init__(self, words: str, *, passing: bool, wait_s: float | None = None) -> None:
        super().__init__(words)
        self.passing = passing
        """Whether the same request may well succeed later."""
        self.wait_s = wait_s
        """Seconds that the server asked for."""


@dataclass(frozen=True)
class Failed:
    """A dialogue that could not be finished, and the server's words."""

    dialogue: Dialogue
    words: str


class Server:
    """An OpenAI-compatible server. Safe to use from several threads."""

    def __init__(self, options: ServerOptions, sampling: Sampling) -> None:
        """Reach the server, choose the model and find out whether it gives token ids.

        Raises:
            ConfigError: an address that is not HTTP, a key that cannot be sent, or no way to choose a model.
            ServerError: no server answers there.
        """
        if not options.url.startswith(("http://", "https://")):
            raise ConfigError(f"server url {options.url!r} does not begin with http:// or https://")
        self.options = options
        """How it is used."""
        self._url = options.url.rstrip("/")
        self._sampling = sampling
        self._headers = _headers(options.api_key_variable)
        try:
            self.model = options.model or self._only_model()
            self.gives_token_ids = self._probe_token_ids()
        except RequestFailedError as failed:
            raise ServerError(
                f"the server at {self._url} cannot be used: {failed}. Start it, or correct --url or --model"
            ) from None

    def patiently(self, ask: Callable[[], T], stop: threading.Event) -> T:
        """Ask, and ask again while the reason of a failure may pass: with doubled and scattered delays.

        Args:
            ask: one request, such as `lambda: server.answer(dialogue)`.
            stop: ends the wait for a further try.

        Raises:
            RequestFailedError: that of the last try.
        """
        for attempt in range(self.options.retries):
            try:
                return ask()
            except RequestFailedError as failed:
                if not failed.passing:
                    raise
                delay = min(60.0, self.options.first_delay_s * 2**attempt)
                # Scattered so that requests that failed together do not come back together.
                scattered = delay * random.uniform(0.5, 1.5)  # noqa: S311 - nothing secret
                if stop.wait(max(scattered, failed.wait_s or 0.0)):
                    raise
        return ask()

    def answer(self, dialogue: Dialogue) -> Answer:
        """The next answer of a dialogue.

        Raises:
            RequestFailedError: the server refused it, or its reply is not a chat completion.
        """
        body = self._body(dialogue.history, dialogue.tools, self._sampling.max_new_tokens)
        if self.gives_token_ids:
            body["return_token_ids"] = True
        return parse_completion(self._call("/chat/completions", body))

    def complete(self, text: str, seed: int, stop: str | None) -> tuple[str, str]:
        """The continuation of a raw text (the server adds its beginning-of-text token), and why it ended.

        Raises:
            RequestFailedError: the server refused it, or its reply is not a completion.
        """
        body = {
            "model": self.model,
            "prompt": text,
            "max_tokens": self._sampling.max_new_tokens,
            "seed": seed,
        }
        if stop is not None:
            body["stop"] = [stop]
        reply = self._call("/completions", body | self._sampling.fields() | self.options.extra)
        try:
            choice = reply["choices"][0]
            return str(choice["text"]), str(choice["finish_reason"])
        except (KeyError, IndexError, TypeError):
            raise RequestFailedError(f"not a completion: {str(reply)[:_WORDS]}", passing=False) from None

    def _body(self, messages: list[dict[str, Any]], tools: Any, max_tokens: int) -> dict[str, Any]:
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            **self._sampling.fields(),
        }
        if tools:
            body["tools"] = list(tools)
        if self._sampling.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self._sampling.thinking}
        return body | self.options.extra

    def _only_model(self) -> str:
        reply = self._call("/models", None)
        try:
            listed = [str(model["id"]) for model in reply["data"]]
        except (KeyError, TypeError):
            raise RequestFailedError(f"not a list of models: {str(reply)[:_WORDS]}", passing=False) from None
        if not listed:
            raise ConfigError(
                f"the server at {self._url} lists no model; load one there, or name it by --model"
            )
        if len(listed) > 1:
            raise ConfigError(
                f"the server at {self._url} lists {len(listed)} models: {', '.join(listed[:20])}; name one by --model"
            )
        return listed[0]

    def _probe_token_ids(self) -> bool:
        """One token is asked for: servers that do not know the field refuse it or leave it out."""
        body = self._body([{"role": "user", "content": "Hello."}], None, 1)
        try:
            reply = self._call("/chat/completions", body | {"return_token_ids": True})
        except RequestFailedError as failed:
            if failed.passing:
                raise
            self._call("/chat/completions", body)
            return False
        return parse_completion(reply).completion_ids is not None

    def _call(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self._url + path, data, self._headers)  # noqa: S310 - http(s), checked above
            with urllib.request.urlopen(request, timeout=self.options.timeout_s) as reply:  # noqa: S310
                words = reply.read()
        except urllib.error.HTTPError as error:
            raise _refusal(error) from None
        except (OSError, http.client.HTTPException) as error:
            raise RequestFailedError(f"{type(error).__name__}: {error}", passing=True) from None
        except ValueError as error:
            raise RequestFailedError(f"not an address that can be asked: {error}", passing=False) from None
        try:
            parsed = json.loads(words)
        except ValueError as error:
            raise RequestFailedError(f"a reply that is not JSON: {error}", passing=True) from None
        if not isinstance(parsed, dict):
            raise RequestFailedError(f"a reply that is not an object: {str(parsed)[:_WORDS]}", passing=False)
        return parsed


def _headers(key_variable: str) -> dict[str, str]:
    """Of every request: with the server's key, where there is one.

    Raises:
        ConfigError: the key cannot be sent. It is not shown, which the HTTP library's own error would do.
    """
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(key_variable):
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"the server's key in {key_variable} holds a line end or another character that cannot be sent; set it "
                "to the key alone, or name another variable by --api-key-variable"
            )
        headers["Authorization"] = f"Bearer {key}"
    return headers


def _refusal(error: urllib.error.HTTPError) -> RequestFailedError:
    words = error.read(_WORDS).decode("utf-8", "replace").strip()
    wait = error.headers.get("Retry-After", "")
    return RequestFailedError(
        f"HTTP {error.code}: {words}",
        passing=error.code in _RETRIED,
        wait_s=float(wait) if wait.isdigit() else None,
    )


def parse_completion(reply: dict[str, Any]) -> Answer:
    """Read a chat completion; token ids where vLLM's fields `prompt_token_ids` and `token_ids` are there.

    Raises:
        RequestFailedError: it is not a chat completion.
    """
    try:
        choice = reply["choices"][0]
        message = choice["message"]
        prompt_ids = reply.get("prompt_token_ids") or choice.get("prompt_token_ids")
        token_ids = choice.get("token_ids")
        return Answer(
            content=message.get("content") or "",
            finish_reason=choice.get("finish_reason") or "stop",
            reasoning=message.get("reasoning_content") or message.get("reasoning"),
            tool_calls=tuple(message.get("tool_calls") or ()),
            prompt_ids=tuple(prompt_ids) if prompt_ids else None,
            completion_ids=tuple(token_ids) if token_ids else None,
        )
    except (KeyError, IndexError, TypeError, AttributeError):
        raise RequestFailedError(f"not a chat completion: {str(reply)[:_WORDS]}", passing=False) from None


def in_flight(items: Iterator[T], work: Callable[[T, threading.Event], U], concurrency: int) -> Iterator[U]:
    """Results in the order in which they become ready, with at most `concurrency` items in work.

    Args:
        items: read only as far as there is room.
        work: called in a thread with an item and an event that is set when nobody waits any more; what it
            raises is raised here.
        concurrency: threads.
    """
    todo: queue.SimpleQueue[tuple[T, Future[U]] | None] = queue.SimpleQueue()
    done: queue.SimpleQueue[Future[U]] = queue.SimpleQueue()
    stop = threading.Event()

    def loop() -> None:
        while (entry := todo.get()) is not None:
            item, future = entry
            try:
                future.set_result(work(item, stop))
            except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
                future.set_exception(error)

    # Daemons: a run that is interrupted must not wait for requests in flight.
    workers = [
        threading.Thread(target=loop, daemon=True, name=f"request-{number}") for number in range(concurrency)
    ]
    for worker in workers:
        worker.start()
    in_work = 0
    try:
        for item in items:
            future: Future[U] = Future()
            future.add_done_callback(done.put)
            todo.put((item, future))
            in_work += 1
            if in_work >= concurrency:
                yield done.get().result()
                in_work -= 1
        for _ in range(in_work):
            yield done.get().result()
    finally:
        stop.set()
        for _ in workers:
            todo.put(None)


class ServerWriter:
    """Finishes dialogues through a server, several at a time."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def made_by(self) -> dict[str, Any]:
        """What every row records of its writer."""
        return {"model": self._server.model}

    def finish(self, dialogues: Iterator[Dialogue]) -> Iterator[Dialogue | Failed]:
        """Finished dialogues in the order in which they become ready, at most `concurrency` in work."""
        return in_flight(dialogues, self._finish_one, self._server.options.concurrency)

    def _finish_one(self, dialogue: Dialogue, stop: threading.Event) -> Dialogue | Failed:
        complete = False
        while not complete:
            try:
                complete = dialogue.add(self._server.patiently(lambda: self._server.answer(dialogue), stop))
            except RequestFailedError as failed:
                return Failed(dialogue, str(failed))
        return dialogue
