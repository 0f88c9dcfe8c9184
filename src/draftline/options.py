"""Settings of the commands that read a drafter. They import nothing heavy, as those in `data.options`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from draftline.config import Frozen

Caches = Literal["auto", "growing", "fixed"]


class MeasureOptions(Frozen):
    """What an evaluation does with each file or set of prompts."""

    num_prompts: int = Field(default=64, gt=0)
    """Prompts to replay of each file or set."""
    max_new_tokens: int = Field(default=256, gt=0)
    """Longest answer."""
    thinking: Literal["off", "on", "both"] = "off"
    """The target's thinking switch; both asks every prompt twice."""
    compare: int = Field(default=8, ge=0)
    """Prompts that are also decoded for real, with and without the drafter; 0 leaves speed out."""
    caches: Caches = "auto"
    """Of that comparison. fixed: preallocated on both sides, and on CUDA each pass is one graph; not for targets that
    keep a running state. auto: fixed on CUDA where the target allows it, growing elsewhere."""


class GenerateOptions(Frozen):
    """How an answer is written."""

    max_new_tokens: int = Field(default=256, gt=0)
    """Longest answer."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy; above, tokens are sampled from exactly the target's distribution."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Smallest set of tokens with this probability that is sampled from."""
    top_k: int = Field(default=0, ge=0)
    """Most likely tokens that are sampled from; 0 for all."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Of the sampling."""
    thinking: bool = False
    """Let the target think first, if it can."""

    @model_validator(mode="after")
    def _sampling_has_a_temperature(self) -> Self:
        if self.temperature == 0 and (self.top_p, self.top_k, self.seed) != (1.0, 0, 0):
            raise ValueError(
                "top_p, top_k and seed have no effect at temperature 0, which is greedy; set a temperature or leave "
                "them out"
            )
        return self


class PlanOptions(Frozen):
    """What is planned for."""

    devices: int | None = Field(default=None, gt=0)
    """Devices to plan for; none takes this machine's."""
    memory_gib: float | None = Field(default=None, gt=0)
    """Memory of one of them; none takes this machine's."""
    tflops: float | None = Field(default=None, gt=0)
    """Rate that one of them reaches; none times both sides when a GPU is here."""
