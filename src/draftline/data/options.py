"""Settings of the data commands. They import nothing heavy, so that the command line can show them at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from draftline.config import Frozen
from draftline.data.sampling import Sampling


class PrepareOptions(Frozen):
    """How conversations become documents."""

    max_length: int = Field(default=4096, ge=2)
    """Tokens: a longer document is clipped, and counted. Not set, the target's context where that is less."""
    thinking: Literal["auto", "on", "off"] = "auto"
    """The template's thinking switch: on, off, or by whether the answer itself holds reasoning."""
    turns: Literal["all", "last"] = "all"
    """Supervise every answer of a conversation, or the last only."""
    truncated: Literal["keep", "drop"] = "keep"
    """What to do with answers that a length limit cut off."""
    on_error: Literal["stop", "skip"] = "stop"
    """A line that is not a conversation stops the preparation, or is counted and skipped."""
    max_unmasked_share: float = Field(default=0.1, ge=0, le=1)
    """Share of rows without a supervised token above which the template is taken to be wrong."""
    template: Path | None = None
    """Jinja file to use instead of the tokenizer's chat template."""
    template_variables: dict[str, Any] = Field(default_factory=dict)
    """Further variables for the template, as the server will be given them; JSON on the command line."""
    tools: Path | None = None
    """JSON file with the tools that were offered in conversations that do not name theirs."""
    stop_token_ids: tuple[int, ...] | None = None
    """Tokens that end the target's answer, besides the tokenizer's eos; none reads generation_config.json
    beside the tokenizer."""
    workers: int | None = Field(default=None, ge=1)
    """Processes; none takes every core when the source is worth it. The store does not depend on it."""


class RegenerateOptions(Frozen):
    """Which answers are written, and when to give up."""

    turns: Literal["all", "last"] = "all"
    """Write every answer of a conversation anew, or only the last, after the given ones."""
    tools: Path | None = None
    """JSON file with the tools to offer in conversations that do not name theirs."""
    give_up_after: int = Field(default=10, ge=1)
    """Failures in a row that end the run with the server's words."""
    limit: int | None = Field(default=None, ge=1)
    """Conversations to take from the source, those of earlier runs included; none means all."""


class SynthesizeOptions(Frozen):
    """How many prompts, and when to give up."""

    count: int = Field(gt=0)
    """Prompts in the output, those of earlier runs included."""
    batch_size: int = Field(default=32, gt=0)
    """User turns drawn at a time."""
    min_yield: float = Field(default=0.02, ge=0, le=1)
    """Share of usable turns below which the target is not able to do this."""


class TurnOptions(Frozen):
    """How user turns are drawn."""

    max_new_tokens: int = Field(default=256, ge=1)
    """Tokens after which a turn that has not ended is left out."""
    temperature: float = Field(default=1.0, ge=0)
    """Higher is more varied."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus; none takes the target's own default."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Of the sampling."""

    @property
    def sampling(self) -> Sampling:
        """The part that does not depend on who draws."""
        return Sampling(max_new_tokens=self.max_new_tokens, temperature=self.temperature, top_p=self.top_p)


class RequestOptions(Frozen):
    """How hard a server is used, and how long it is waited for."""

    concurrency: int = Field(default=64, ge=1)
    """Requests in flight."""
    retries: int = Field(default=5, ge=0)
    """Further tries of a request that failed for a passing reason."""
    first_delay_s: float = Field(default=1.0, ge=0)
    """Seconds before the first of them; doubled for each that follows, at most a minute."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Seconds one request may take."""
    api_key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the server's key, if it wants one."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further fields of every request; JSON on the command line."""


class ServerOptions(RequestOptions):
    """Where the server is, and how it is used."""

    url: str
    """Base address, such as http://localhost:8000/v1."""
    model: str | None = None
    """Name of the model; none takes the only one that the server lists."""


class LocalOptions(Frozen):
    """How a model in this process answers."""

    batch_size: int = Field(default=32, ge=1)
    """Prompts that a model in this process answers at a time."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the answers that a model in this process draws."""
