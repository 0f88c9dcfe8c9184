"""One record of any common form becomes one Conversation (or ready token ids).

Known forms: chat messages, ShareGPT, prompt and response, token ids with a mask, prompt and completion ids.
Nothing here knows a tokenizer or a template.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftline.data.reasons import Reason, UnusableRow
from draftline.errors import ConfigError

KNOWN_FORMS = (
    "messages=[{role, content}], conversations=[{from, value}], prompt + response, prompt + completion, "
    "instruction + output, input_ids + loss_mask, prompt_ids + completion_ids, token_turns"
)

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "function_call": "assistant",
    "ipython": "tool",
}
_KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")
_PAIRS = (("prompt", "response"), ("prompt", "completion"), ("instruction", "output"))
_MASKS = ("loss_mask", "assistant_masks", "assistant_mask", "labels")
_TURNS = ("messages", "conversations", "conversation")
_TOKEN_IDS = ("input_ids", "prompt_ids", "completion_ids", "token_turns")
_SURROGATE = re.compile("[\ud800-\udfff]")
_REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Conversation:
    """Normalised turns. Every message has `role` and text `content`; an assistant's may also have
    `reasoning_content`, and `tool_calls` whose arguments are mappings."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None = None
    truncated: bool = False
    """The last answer was cut off by a length limit, not ended by its writer."""

    @property
    def answers(self) -> tuple[int, ...]:
        """Indices of the assistant's messages."""
        return tuple(i for i, message in enumerate(self.messages) if message["role"] == "assistant")

    @property
    def key(self) -> str:
        """Content hash, 16 hexadecimal digits: the same turns have the same key in any file and any order."""
        return content_key([list(self.messages), self.tools])


@dataclass(frozen=True)
class TokenText:
    """Token ids of one document, and which of them the target wrote."""

    input_ids: tuple[int, ...]
    supervised: tuple[bool, ...]


@dataclass(frozen=True)
class TokenRow:
    """A row that needs no template."""

    documents: tuple[TokenText, ...]
    truncated: bool = False

    @property
    def key(self) -> str:
        """Content hash, 16 hexadecimal digits."""
        return content_key([[text.input_ids, text.supervised] for text in self.documents])


def content_key(value: Any) -> str:
    """Hash of a JSON value that does not depend on the order of keys."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def parse_record(record: Any) -> Conversation | TokenRow:
    """Read one record of any known form.

    Raises:
        UnusableRow: the record is malformed (`reason.malformed`), or holds nothing to learn from.
    """
    if not isinstance(record, dict):
        raise UnusableRow(Reason.NOT_A_ROW, f"a {type(record).__name__}; known forms: {KNOWN_FORMS}")
    if "input_ids" in record:
        return TokenRow((_masked_ids(record),), _is_truncated(record))
    if "prompt_ids" in record or "token_turns" in record:
        return TokenRow(_joined_turns(record), _is_truncated(record))
    messages = [_message(raw) for raw in _raw_messages(record)]
    _refuse_unknown_roles(messages)
    return Conversation(tuple(messages), _tools(record.get("tools")), _is_truncated(record))


def turns_of(record: Any) -> Any:
    """A record that holds its turns both as messages and as token ids, such as one of `draftline regenerate`, without
    the ids; any other as it is. For whoever asks the turns again."""
    if not isinstance(record, dict) or not any(key in record for key in _TURNS):
        return record
    return {key: value for key, value in record.items() if key not in _TOKEN_IDS}


def read_tools(path: Path) -> tuple[dict[str, Any], ...]:
    """Tool definitions of a JSON file: a list, or one.

    Raises:
        ConfigError: the file cannot be read or holds none.
    """
    try:
        tools = _tools(json.loads(path.read_text(encoding="utf-8-sig")))
    except (OSError, ValueError, UnusableRow) as error:
        raise ConfigError(f"the tools of {path} cannot be read: {error}") from None
    if tools is None:
        raise ConfigError(f"{path} holds no tools; give a JSON list of tool definitions")
    return tools


def trim_to_last_answer(conversation: Conversation) -> Conversation:
    """Leave out what follows the last answer, and refuse turns that no model would meet.

    Raises:
        UnusableRow: no assistant turn, an empty one, or two turns of the same kind in a row.
    """
    messages = conversation.messages
    if not messages:
        raise UnusableRow(Reason.NO_MESSAGES)
    if not conversation.answers:
        only_system = all(message["role"] in ("system", "developer") for message in messages)
        raise UnusableRow(Reason.SYSTEM_ONLY if only_system else Reason.USER_ONLY)
    kept = messages[: conversation.answers[-1] + 1]
    for index, message in enumerate(kept):
        _refuse_repeated_role(kept, index)
        if message["role"] == "assistant" and not _says_something(message):
            raise UnusableRow(Reason.EMPTY_ASSISTANT, f"message {index}")
    return Conversation(kept, conversation.tools, conversation.truncated)


def has_reasoning(message: dict[str, Any]) -> bool:
    """Whether an assistant's message holds text that was thought before the answer."""
    return bool(message.get("reasoning_content", "").strip()) or "</think>" in message["content"]


def refuse_half_pairs(text: str) -> None:
    """Refuse text that no tokenizer takes.

    Raises:
        UnusableRow: it holds half of a surrogate pair.
    """
    if _SURROGATE.search(text):
        raise UnusableRow(Reason.NOT_TEXT, "half of a surrogate pair, which no tokenizer takes")


def _refuse_unknown_roles(messages: list[dict[str, Any]]) -> None:
    # Whether such a turn is the target's own or context can only be guessed.
    unknown = sorted({message["role"] for message in messages} - set(_KNOWN_ROLES))
    if unknown:
        raise UnusableRow(
            Reason.UNKNOWN_ROLE,
            f"{', '.join(map(repr, unknown))}; known are {', '.join((*_KNOWN_ROLES, *_ROLES))}; rename such turns",
        )


def _refuse_repeated_role(messages: tuple[dict[str, Any], ...], index: int) -> None:
    role = messages[index]["role"]
    if index and role in ("user", "assistant") and messages[index - 1]["role"] == role:
        raise UnusableRow(Reason.ROLES, f"messages {index - 1} and {index} are both '{role}'")


def _says_something(message: dict[str, Any]) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content"))


def _raw_messages(record: dict[str, Any]) -> list[Any]:
    for key in _TURNS:
        if key in record:
            turns = _decoded(record[key])
            if not isinstance(turns, list):
                raise UnusableRow(
                    Reason.NOT_A_ROW, f"'{key}' is a {type(turns).__name__}, not a list of turns"
                )
            system = record.get("system")
            return [{"role": "system", "content": system}, *turns] if system else turns
    for ask, answer in _PAIRS:
        if ask in record:
            return _pair(record, ask, answer)
    raise UnusableRow(Reason.NOT_A_ROW, f"keys {sorted(record)[:8]}; known forms: {KNOWN_FORMS}")


def _pair(record: dict[str, Any], ask: str, answer: str) -> list[Any]:
    # "prompt" opens two forms; the one whose answer is there wins.
    if answer not in record and ask == "prompt" and "completion" in record:
        answer = "completion"
    prompt, response = record[ask], record.get(answer)
    if extra := record.get("input"):
        prompt = f"{prompt}\n\n{extra}"
    asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if response is None:
        answered = []
    else:
        answered = response if isinstance(response, list) else [{"role": "assistant", "content": response}]
    system = record.get("system")
    return ([{"role": "system", "content": system}] if system else []) + asked + answered


def _message(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise UnusableRow(Reason.NOT_A_ROW, f"a message is a {type(raw).__name__}, not an object")
    named = raw.get("role", raw.get("from"))
    if not isinstance(named, str):
        raise UnusableRow(Reason.NOT_A_ROW, f"a message without 'role'; its keys are {sorted(raw)[:8]}")
    role = _ROLES.get(named.lower(), named.lower())
    message: dict[str, Any] = {"role": role, "content": _text(raw.get("content", raw.get("value")))}
    for key in _REASONING:
        if isinstance(raw.get(key), str) and raw[key]:
            message["reasoning_content"] = raw[key]
            break
    if _gives_thought_twice(message):
        del message["reasoning_content"]  # some servers give a thought twice; the target wrote it once
    if named == "function_call":
        message |= {"content": "", "tool_calls": _tool_calls(message["content"])}
    elif raw.get("tool_calls"):
        message["tool_calls"] = _tool_calls(raw["tool_calls"])
    for key in ("name", "tool_call_id"):
        if isinstance(raw.get(key), str):
            message[key] = raw[key]
    return message


def _gives_thought_twice(message: dict[str, Any]) -> bool:
    thought = message.get("reasoning_content", "").strip()
    inside, tag, _ = message["content"].partition("</think>")
    return bool(thought and tag) and inside.strip().removeprefix("<think>").strip() == thought


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, list):
        return "".join(_part_text(part) for part in content)
    if not isinstance(content, str):
        raise UnusableRow(Reason.NOT_TEXT, f"a {type(content).__name__}")
    refuse_half_pairs(content)
    return content


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return _text(part)
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return _text(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise UnusableRow(Reason.NOT_TEXT, f"a part of type {kind!r}")


def _tool_calls(raw: Any) -> list[dict[str, Any]]:
    calls = _decoded(raw)
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list):
        raise UnusableRow(Reason.NOT_A_ROW, f"tool_calls is a {type(calls).__name__}")
    return [_tool_call(_decoded(call)) for call in calls]


def _tool_call(call: Any) -> dict[str, Any]:
    function = _decoded(call.get("function", call)) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnusableRow(Reason.NOT_A_ROW, f"a tool call without a function name: {str(call)[:80]}")
    arguments = _decoded(function.get("arguments", function.get("parameters")) or {})
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**identity, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _decoded(value: Any) -> Any:
    """Read JSON that was stored as a string (tables cannot hold mixed types); any other value is itself."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            return value
    return value


def _tools(raw: Any) -> tuple[dict[str, Any], ...] | None:
    tools = _decoded(raw)
    if not tools:
        return None
    decoded = [_decoded(tool) for tool in (tools if isinstance(tools, list) else [tools])]
    if not all(isinstance(tool, dict) for tool in decoded):
        raise UnusableRow(Reason.NOT_A_ROW, "'tools' is not a list of objects")
    return tuple(decoded)


def _is_truncated(record: dict[str, Any]) -> bool:
    return record.get("finish_reason") == "length" or record.get("truncated") is True


def _masked_ids(record: dict[str, Any]) -> TokenText:
    ids = _ids(record, "input_ids")
    name = next((name for name in _MASKS if name in record), None)
    if name is None:
        raise UnusableRow(Reason.NOT_A_ROW, f"input_ids without a mask; give one of {', '.join(_MASKS)}")
    supervised = _supervised(record, name, ids)
    if name != "labels" and isinstance(record.get("labels"), list):
        # Where labels are shifted by one, a mask beside them marks labels, not tokens.
        _supervised(record, "labels", ids)
    return TokenText(ids, supervised)


def _supervised(record: dict[str, Any], name: str, ids: tuple[int, ...]) -> tuple[bool, ...]:
    """Labels mark what is not supervised by -100, masks by 0."""
    flags = _ids(record, name) if name == "labels" else _mask(record, name)
    if len(flags) != len(ids):
        raise UnusableRow(Reason.LENGTHS_DIFFER, f"{len(ids)} input_ids, {len(flags)} in '{name}'")
    if name != "labels":
        return tuple(map(bool, flags))
    for place, (token, label) in enumerate(zip(ids, flags, strict=True)):
        if label not in (token, -100):
            raise UnusableRow(
                Reason.LABELS_DIFFER,
                f"label {label} at place {place} of input id {token}; a label that is not -100 must equal input_ids "
                "at its own place (not shifted by one)",
            )
    return tuple(label != -100 for label in flags)


def _joined_turns(record: dict[str, Any]) -> tuple[TokenText, ...]:
    """Prompts and completions of successive turns: one document as long as each goes on from the one before."""
    turns = record.get("token_turns", [record])
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise UnusableRow(Reason.NOT_A_ROW, "'token_turns' is not a list of prompt_ids and completion_ids")
    documents: list[TokenText] = []
    for turn in turns:
        prompt, completion = _ids(turn, "prompt_ids"), _ids(turn, "completion_ids")
        mask: tuple[bool, ...] = ()
        if documents and prompt[: len(documents[-1].input_ids)] == documents[-1].input_ids:
            mask = documents.pop().supervised
        mask += (False,) * (len(prompt) - len(mask)) + (True,) * len(completion)
        documents.append(TokenText(prompt + completion, mask))
    return tuple(documents)


def _mask(record: dict[str, Any], name: str) -> tuple[int, ...]:
    values = _list(record, name)
    for place, value in enumerate(values):
        if not isinstance(value, int) or value not in (0, 1):
            raise UnusableRow(
                Reason.BAD_MASK, f"'{name}' has {_shown(value)} at place {place}; give 0 or 1, false or true"
            )
    return tuple(values)


def _ids(record: dict[str, Any], name: str) -> tuple[int, ...]:
    values = _list(record, name)
    for place, value in enumerate(values):
        if type(value) is not int:  # to Python a bool is an integer, too
            raise UnusableRow(
                Reason.NOT_A_ROW,
                f"'{name}' is not a list of integers: it has {_shown(value)} at place {place}",
            )
    return tuple(values)


def _list(record: dict[str, Any], name: str) -> list[Any]:
    values = record.get(name)
    if not isinstance(values, list):
        raise UnusableRow(Reason.NOT_A_ROW, f"'{name}' is not a list of integers")
    return values


def _shown(value: Any) -> str:
    """A value as its row has it."""
    return json.dumps(value, default=str)[:40]
