"""Why a row was not kept, or was changed: the words that the report counts by."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why a source row gave no training document."""

    # Malformed: the file is not what it claims to be. Stops the preparation unless on_error="skip".
    NOT_JSON = "not valid JSON"
    NOT_A_ROW = "not a conversation in any known form"
    LENGTHS_DIFFER = "input_ids and mask differ in length"
    LABELS_DIFFER = "labels other than -100 that differ from input_ids"
    BAD_MASK = "a mask with values other than 0 and 1"
    BAD_TOKEN = "token ids outside the vocabulary"  # noqa: S105 - a token of text, not a secret

    # Unusable: well formed, but there is nothing to learn from it.
    NO_MESSAGES = "no messages"
    SYSTEM_ONLY = "system turn only"
    USER_ONLY = "no assistant turn"
    EMPTY_ASSISTANT = "empty assistant turn"
    UNKNOWN_ROLE = "unknown role"
    ROLES = "roles do not alternate"
    NOT_TEXT = "content that is not text"
    TRUNCATED = "answer was cut off (finish_reason=length)"
    REFUSED = "the chat template refused the conversation"
    NO_BOUNDARY = "the template does not show where the answer starts"
    CONTENT_LOST = "the template leaves out part of the answer"
    STOP_INSIDE = "an end-of-turn token inside the answer"
    STRADDLES = "a token crosses the border of the answer"
    NO_SUPERVISED = "no supervised token"
    TOO_FEW = "fewer than two supervised tokens in a row"
    PROMPT_TOO_LONG = "prompt alone is longer than max_length"

    @property
    def malformed(self) -> bool:
        """Whether the file itself is wrong, as against a sound row that cannot be used."""
        return self in _MALFORMED

    @property
    def unmasked(self) -> bool:
        """Whether no answer could be marked in the row: a sign of a template that does not fit."""
        return self in _UNMASKED


_MALFORMED = frozenset(
    {
        Reason.NOT_JSON,
        Reason.NOT_A_ROW,
        Reason.LENGTHS_DIFFER,
        Reason.LABELS_DIFFER,
        Reason.BAD_MASK,
        Reason.BAD_TOKEN,
    }
)
_UNMASKED = frozenset(
    {Reason.REFUSED, Reason.NO_BOUNDARY, Reason.CONTENT_LOST, Reason.STRADDLES, Reason.NO_SUPERVISED}
)


class Note(StrEnum):
    """What happened to a row that was kept all the same."""

    CLIPPED = "clipped to max_length"
    BEYOND_CONTEXT = "clipped to the target's context"
    TRIMMED = "turns after the last answer left out"
    PER_TURN = "one document per answer (the template rewrites earlier turns)"
    NO_END = "answer without an end-of-turn token"
    TRUNCATED = "answer was cut off (finish_reason=length), kept"
    LEFT_OUT = "an answer that cannot be marked left as context"
    MARKS_CORRECTED = "template's own marks corrected at the edges"


class UnusableRow(Exception):
    """A row that gives no document: counted, not raised to the user. `detail` says more about this row."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type[UnusableRow], tuple[Reason, str]]:
        return UnusableRow, (self.reason, self.detail)
