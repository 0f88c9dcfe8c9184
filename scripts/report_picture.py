"""Draw docs/images/prepare-report.svg: the report of a small, imperfect file of conversations.

python scripts/report_picture.py
"""

from __future__ import annotations

import io
import json
import re
import tempfile
from pathlib import Path

from rich.console import Console
from transformers import AutoTokenizer

from draftline.data.prepare import PrepareOptions, prepare
from draftline.data.report import print_report
from draftline.embedded import embedded_path

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "prepare-report.svg"


def conversations() -> list[dict[str, object]]:
    """Good rows and one of each common fault."""
    good = [
        {
            "prompt": f"Count from {n} to {n + 4}.",
            "response": ", ".join(str(k) for k in range(n, n + 5)) + ".",
        }
        for n in range(10, 60)
    ]
    two_turns = {
        "messages": [
            {"role": "user", "content": "Add 117 and 82."},
            {"role": "assistant", "content": "So 117 + 82 = 199."},
            {"role": "user", "content": "Add 3."},
            {"role": "assistant", "content": "So 199 + 3 = 202."},
        ]
    }
    faults = [
        {"prompt": "Repeat: The gray owl.", "response": ""},
        {"prompt": "Repeat: The blue hill."},
        {"messages": [{"role": "system", "content": "Be brief."}]},
        {"prompt": "Stop here.", "response": "I stop <|im_end|> and go on."},
        {"prompt": "Count to 100.", "response": "1, 2, 3, 4,", "finish_reason": "length"},
        {"prompt": "Repeat: " + "the owl " * 100, "response": "the owl"},
        {"prompt": "Count from 1 to 60.", "response": ", ".join(str(k) for k in range(1, 61)) + "."},
    ]
    return [two_turns, *good, *faults, good[0]]


def draw() -> str:
    """Prepare the conversations and draw the report, as SVG."""
    console = Console(
        record=True, width=104, force_terminal=True, color_system="truecolor", file=io.StringIO()
    )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "chats.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in conversations()), encoding="utf-8")
        tokenizer = AutoTokenizer.from_pretrained(embedded_path("tiny"))
        report = prepare(source, tokenizer, Path(folder) / "store", PrepareOptions(max_length=128))
    examples = {reason: example.replace(folder + "/", "") for reason, example in report.examples.items()}
    report.examples.clear()
    report.examples.update(examples)
    print_report(report, console)
    picture = console.export_svg(
        title="draftline prepare chats.jsonl store --target builtin:tiny --max-length 128"
    )
    # A picture in a repository must not fetch fonts from elsewhere.
    return re.sub(r"@font-face \{.*?\}\n", "", picture, flags=re.DOTALL)


def main() -> None:
    """Save the picture."""
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
