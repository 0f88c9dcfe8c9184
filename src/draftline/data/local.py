"""Answers from a model in this process, in batches: for small targets, on a CPU or a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftline.data.dialogue import Answer, Dialogue
from draftline.data.encoding import count_ids
from draftline.data.reasons import UnusableRow
from draftline.data.sampling import Sampling
from draftline.data.server import Failed
from draftline.data.template import ChatTemplate, TemplateOptions
from draftline.errors import ConfigError

_WINDOW = 8
"""Batches that are read ahead, so that prompts of like length share a batch and little is padded."""


class LocalModel:
    """A model with its tokenizer, asked for batches of continuations.

    Raises:
        ConfigError: the longest answer fills the target's context.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, seed: int = 0
    ) -> None:
        self._model = model.eval()
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, TemplateOptions())
        """The tokenizer's own chat template."""
        self.sampling = sampling
        self.seed = seed
        self.stop_ids = _stop_ids(model, tokenizer)
        """Tokens that end an answer."""
        rows = model.config.get_text_config().vocab_size
        self._no_tokens = list(range(count_ids(tokenizer), rows))
        """Rows of a padded head that stand for no token: they must not be drawn."""
        self.limit: int = model.config.get_text_config().max_position_embeddings
        """Tokens that a prompt and its answer may have together."""
        if sampling.max_new_tokens >= self.limit:
            raise ConfigError(
                f"an answer of {sampling.max_new_tokens} tokens (max_new_tokens) leaves no room for a prompt in the "
                f"target's context of {self.limit} tokens (max_position_embeddings); lower --max-new-tokens"
            )

    def continue_batch(self, prompts: list[list[int]], number: int) -> list[list[int]]:
        """Generated ids of each prompt, up to and with its stop token.

        The random numbers of a batch follow from the seed and its number alone.
        """
        longest = max(len(prompt) for prompt in prompts)
        pad = self.stop_ids[0]
        ids = torch.tensor(
            [[pad] * (longest - len(prompt)) + prompt for prompt in prompts]
        )  # [batch, longest]
        real = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        device = self._model.device
        with torch.inference_mode(), torch.random.fork_rng(_devices(device)):
            torch.manual_seed(self.seed + number)
            generate: Any = self._model.generate
            made = generate(
                ids.to(device),
                attention_mask=real.to(device),
                max_new_tokens=self.sampling.max_new_tokens,
                pad_token_id=pad,
                eos_token_id=list(self.stop_ids),
                suppress_tokens=self._no_tokens or None,
                **_generate_fields(self.sampling),
            )
        return [self._to_stop(row) for row in made[:, longest:].tolist()]

    def text(self, ids: list[int]) -> str:
        """What the ids say, without the token that ended them."""
        said = ids[:-1] if self.ended(ids) else ids
        return str(self.tokenizer.decode(said, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def ended(self, ids: list[int]) -> bool:
        """Whether the model came to an end by itself."""
        return bool(ids) and ids[-1] in self.stop_ids

    def _to_stop(self, ids: list[int]) -> list[int]:
        end = next((place for place, token in enumerate(ids) if token in self.stop_ids), len(ids) - 1)
        return ids[: end + 1]


class LocalWriter:
    """Finishes dialogues with a model in this process."""

    def __init__(self, model: LocalModel, name: str, batch_size: int) -> None:
        self._model = model
        self._name = name
        self._batch_size = batch_size
        self._numbers = itertools.count()

    def made_by(self) -> dict[str, Any]:
        """What every row records of its writer."""
        return {"model": self._name}

    def finish(self, dialogues: Iterator[Dialogue]) -> Iterator[Dialogue | Failed]:
        """Finished dialogues, batch by batch."""
        while window := list(itertools.islice(dialogues, self._batch_size * _WINDOW)):
            yield from self._finish_window(window)

    def _finish_window(self, window: list[Dialogue]) -> Iterator[Dialogue | Failed]:
        open_ones = window
        while open_ones:
            prompts: list[tuple[Dialogue, list[int]]] = []
            for dialogue in open_ones:
                prompt = self._prompt(dialogue)
                if isinstance(prompt, str):
                    yield Failed(dialogue, prompt)
                else:
                    prompts.append((dialogue, prompt))
            prompts.sort(key=lambda pair: len(pair[1]))
            open_ones = []
            for first in range(0, len(prompts), self._batch_size):
                for dialogue, complete in self._answer(prompts[first : first + self._batch_size]):
                    if complete:
                        yield dialogue
                    else:
                        open_ones.append(dialogue)

    def _prompt(self, dialogue: Dialogue) -> list[int] | str:
        """Token ids of the next prompt, or why there can be none."""
        model = self._model
        try:
            text = model.template.prompt(dialogue.history, dialogue.tools, think=model.sampling.thinking)
        except UnusableRow as unusable:
            return str(unusable)
        ids: Any = model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        answer = model.sampling.max_new_tokens
        if len(ids) + answer <= model.limit:
            return ids
        return (
            f"the prompt has {len(ids)} tokens; with an answer of {answer} (max_new_tokens) it is longer than the "
            f"target's context of {model.limit} tokens (max_position_embeddings)"
        )

    def _answer(self, batch: list[tuple[Dialogue, list[int]]]) -> Iterator[tuple[Dialogue, bool]]:
        made = self._model.continue_batch([prompt for _, prompt in batch], next(self._numbers))
        for (dialogue, prompt), ids in zip(batch, made, strict=True):
            answer = Answer(
                content=self._model.text(ids),
                finish_reason="stop" if self._model.ended(ids) else "length",
                prompt_ids=tuple(prompt),
                completion_ids=tuple(ids),
            )
            yield dialogue, dialogue.add(answer)


def _devices(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


def _generate_fields(sampling: Sampling) -> dict[str, Any]:
    if sampling.temperature == 0:
        # The sampling parameters of the target's own defaults mean nothing here and would be warned about.
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return ({"do_sample": True} if sampling.temperature else {}) | sampling.fields()


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    configured = model.generation_config.eos_token_id if model.generation_config else None
    listed = configured if isinstance(configured, list) else [configured]
    ids = [token for token in (*listed, tokenizer.eos_token_id) if isinstance(token, int)]
    return tuple(dict.fromkeys(ids))
