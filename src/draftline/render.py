"""Speculative decoding as a person sees it: what was drafted, what the target kept, what it wrote itself."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from draftline.decode import Event, Prefilled

ACCEPTED, REJECTED, OWN = "black on green3", "red strike", "bold cyan"
LEGEND = Text.assemble(
    ("accepted drafts", ACCEPTED), "  ", ("rejected drafts", REJECTED), "  ", ("target's own", OWN)
)


def styled_steps(events: Iterator[Event], tokenizer: PreTrainedTokenizerBase) -> Iterator[Text]:
    """One piece of coloured text per event, in the order of the answer; rejected drafts stand struck out."""
    for event in events:
        if isinstance(event, Prefilled):
            yield _piece(tokenizer, (event.token,), OWN)
            continue
        kept = event.produced[: event.accepted]
        yield Text.assemble(
            _piece(tokenizer, kept, ACCEPTED),
            _piece(tokenizer, event.drafted[event.accepted : event.accepted + 1], REJECTED),
            _piece(tokenizer, event.produced[event.accepted :], OWN),
        )


def _piece(tokenizer: PreTrainedTokenizerBase, tokens: tuple[int, ...], style: str) -> Text:
    return Text(str(tokenizer.decode(list(tokens))), style=style)
