"""What streams to a terminal: colours by origin, whole characters, and nothing rejected where there is no colour."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from draftline.decoding.decode import Prefilled, Verified
from draftline.decoding.render import ACCEPTED, OWN, REJECTED, print_answer, styled_steps
from draftline.embedded import embedded_path


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(embedded_path("tiny"))


def step(drafted, accepted, produced):
    return Verified(tuple(drafted), accepted, tuple(produced), 0.5, 0.5)


def pieces(text):
    """Non-empty stretches of a rich text with their styles."""
    return [
        (text.plain[span.start : span.end], str(span.style)) for span in text.spans if span.end > span.start
    ]


def test_accepted_rejected_and_own_tokens_have_their_colours(tokenizer):
    a, b, c, d, e = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcde")
    first, second = styled_steps(iter([Prefilled(a, 0.1), step((b, c, d), 1, (b, e))]), tokenizer)

    assert (first.plain, str(first.style)) == ("a", OWN)
    assert pieces(second) == [("b", ACCEPTED), ("c", REJECTED), ("e", OWN)]


def test_a_character_of_several_tokens_appears_once_it_is_whole(tokenizer):
    ids = tokenizer.encode("日本", add_special_tokens=False)
    assert len(ids) > 2
    events = [Prefilled(ids[0], 0.1), step(ids[1:3], 2, ids[1:4]), step(ids[4:], len(ids) - 5, ids[4:])]

    texts = [text.plain for text in styled_steps(iter(events), tokenizer, rejected=False)]

    assert "".join(texts) == "日本"
    assert not any("\ufffd" in text for text in texts)


def test_words_keep_the_spaces_that_a_single_token_would_lose():
    inner = Tokenizer(models.WordLevel({"▁the": 0, "▁cat": 1, "▁sat": 2}, unk_token="▁the"))
    inner.decoder = decoders.Metaspace()
    words = PreTrainedTokenizerFast(tokenizer_object=inner)

    texts = [text.plain for text in styled_steps(iter([Prefilled(0, 0.1), step((1,), 1, (1, 2))]), words)]

    assert "".join(texts) == "the cat sat"


def answer(tokenizer, **console):
    stream = io.StringIO()
    a, b, c, d = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcd")
    events = iter([Prefilled(a, 0.5), step((b, c), 1, (b, d))])
    decoded = print_answer(events, tokenizer, Console(file=stream, width=80, highlight=False, **console))
    return decoded, stream.getvalue()


def test_without_colours_only_the_answer_is_written(tokenizer):
    decoded, text = answer(tokenizer)
    assert text.splitlines()[0] == "abd"
    assert "rejected" not in text
    assert (
        text.splitlines()[-1]
        == "3 tokens: 1 by the target's first pass, 2 in 1 verify step, tau 2.00, 2 tokens/s"
    )
    assert decoded.tokens_per_s == 3 / 1.5


def test_the_first_token_which_no_verify_step_gave_is_counted_by_itself(tokenizer):
    def last_line(*steps):
        stream = io.StringIO()
        events = iter([Prefilled(5, 1.0), *steps])
        print_answer(events, tokenizer, Console(file=stream, width=60, highlight=False))
        return stream.getvalue().splitlines()[-1]

    alone = step((6, 7), 0, (8,))
    assert last_line(*[alone] * 4).startswith(
        "5 tokens: 1 by the target's first pass, 4 in 4 verify steps, tau 1.00, "
    )
    assert last_line() == "1 token: 1 by the target's first pass, 1 tokens/s"


def test_with_colours_rejected_drafts_and_a_legend_are_shown(tokenizer):
    _, text = answer(tokenizer, force_terminal=True, color_system="truecolor")
    assert "\x1b[" in text
    assert "rejected drafts" in text
    assert "c" in text.splitlines()[0]
