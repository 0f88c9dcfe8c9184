"""Which caches a comparison of speeds decodes with."""

from __future__ import annotations

from collections.abc import Sequence

from draftline.console import Screen
from draftline.decoding.evaluate import Prompt
from draftline.decoding.fixed import FixedDecoding
from draftline.decoding.greedy import Limit, is_recurrent
from draftline.drafter.model import Drafter
from draftline.errors import ConfigError
from draftline.options import Caches
from draftline.target.load import Target


def choose_caches(
    wanted: Caches,
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    limit: Limit,
    screen: Screen,
    sizes: Sequence[int] = (),
) -> FixedDecoding | None:
    """Preallocated caches with room for every prompt and its answer; None for growing ones.

    `auto` is preallocated on CUDA, where each pass is a graph and growing caches measure Python's speed instead of
    the target's; growing on a CPU, and aloud for a target that cannot do otherwise.

    Args:
        sizes: passes of the target, in tokens, that get a graph beside those of plain decoding and of a block.

    Raises:
        ConfigError: `fixed` was asked for and the target cannot decode so.
    """
    if wanted == "growing" or (wanted == "auto" and target.device.type != "cuda"):
        return None
    if wanted == "auto" and is_recurrent(target):
        screen.say(
            f"{target.name} keeps a running state: speeds are measured with growing caches, without graphs"
        )
        return None
    longest = max(len(prompt.input_ids) for prompt in prompts)
    try:
        return FixedDecoding(target, drafter, longest + limit.max_new_tokens, sizes)
    except ConfigError as error:
        if wanted == "fixed":
            raise
        screen.say(f"speeds are measured with growing caches, without graphs: {error}")
        return None
