"""Draw docs/images/generate.svg: answers by speculative decoding in colour, with the drafter of a demo run.

./dev demo && python scripts/generate_picture.py demo
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from draftline.commands import answer_limit, load_pair
from draftline.config import TargetConfig
from draftline.decoding.decode import decode_events
from draftline.decoding.prompts import chat_prompt
from draftline.decoding.render import print_answer

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "generate.svg"
QUESTIONS = ("What is 448 + 294?", "Compose a note from Irma to Felix about the mill.")


def main() -> None:
    """Answer the questions and save what a terminal would show."""
    console = Console(
        record=True,
        width=112,
        force_terminal=True,
        color_system="truecolor",
        file=io.StringIO(),
        highlight=False,
    )
    target, drafter = load_pair(Path(sys.argv[1]), TargetConfig(path="builtin:tiny"))
    limit = answer_limit(target, 120)
    for question in QUESTIONS:
        prompt = chat_prompt(target.tokenizer, question).input_ids
        list(decode_events(target, drafter, prompt, limit))  # the first time loads kernels
        console.print(f"[dim]> {question}[/dim]")
        print_answer(decode_events(target, drafter, prompt, limit), target.tokenizer, console)
        console.print()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    picture = console.export_svg(title="draftline generate demo QUESTION --target builtin:tiny")
    # A picture in a repository must not fetch fonts from elsewhere.
    picture = re.sub(r"@font-face \{.*?\}\n", "", picture, flags=re.DOTALL)
    PICTURE.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
