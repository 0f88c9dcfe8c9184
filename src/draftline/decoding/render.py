"""Speculative decoding as a person sees it: what was drafted, what the target kept, what it wrote itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from draftline.console import visible
from draftline.decoding.decode import Decoded, Event, Prefilled, collect

ACCEPTED, REJECTED, OWN = "white on dark_green", "red strike", "bold cyan"
LEGEND = Text.assemble(
    ("accepted drafts", ACCEPTED), "  ", ("rejected drafts", REJECTED), "  ", ("target's own", OWN)
)


class _Words:
    """Tokens as text, piece by piece: a character of several tokens appears with its last one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._tokenizer, self._backend = tokenizer, backend if isinstance(backend, Tokenizer) else None
        self._stream = DecodeStream(skip_special_tokens=False)

    def add(self, tokens: Sequence[int]) -> str:
        """The text that these tokens add to what was added before."""
        if self._backend is None:  # a tokenizer without a fast form decodes each piece by itself
            return str(self._tokenizer.decode(list(tokens)))
        return "".join(self._stream.step(self._backend, token) or "" for token in tokens)

    def peek(self, tokens: Sequence[int]) -> str:
        """What `add` would give; nothing is added."""
        aside = copy.copy(self)
        aside._stream = copy.copy(self._stream)
        return aside.add(tokens)


def styled_steps(
    events: Iterator[Event], tokenizer: PreTrainedTokenizerBase, *, rejected: bool = True
) -> Iterator[Text]:
    """One piece of coloured text per event, in the order of the answer; rejected drafts stand struck out.

    Args:
        rejected: False leaves them out, for a reader without colours.
    """
    words = _Words(tokenizer)
    for event in events:
        if isinstance(event, Prefilled):
            yield Text(visible(words.add((event.token,))), style=OWN)
            continue
        kept = words.add(event.produced[: event.accepted])
        refused = words.peek(event.drafted[event.accepted : event.accepted + 1]) if rejected else ""
        own = words.add(event.produced[event.accepted :])
        yield Text.assemble((visible(kept), ACCEPTED), (visible(refused), REJECTED), (visible(own), OWN))


def print_answer(events: Iterator[Event], tokenizer: PreTrainedTokenizerBase, console: Console) -> Decoded:
    """Stream an answer, in colour on a terminal, then how it went."""
    seen: list[Event] = []

    def noted() -> Iterator[Event]:
        for event in events:
            seen.append(event)
            yield event

    coloured = console.color_system is not None
    for text in styled_steps(noted(), tokenizer, rejected=coloured):
        console.print(text, end="", soft_wrap=True)
    decoded = collect(iter(seen))
    console.print()
    if coloured:
        console.print(LEGEND)
    console.print(_account(decoded), soft_wrap=True)
    return decoded


def _account(decoded: Decoded) -> str:
    """How many tokens came from where; tau is of the verify steps alone, so the first token stands by itself."""
    tokens, steps = len(decoded.tokens), len(decoded.produced)
    said = f"{tokens} {'token' if tokens == 1 else 'tokens'}: 1 by the target's first pass"
    if steps:
        in_steps = f"{steps} verify {'step' if steps == 1 else 'steps'}"
        said += f", {sum(decoded.produced)} in {in_steps}, tau {decoded.tau:.2f}"
    return f"{said}, {decoded.tokens_per_s:.0f} tokens/s"
