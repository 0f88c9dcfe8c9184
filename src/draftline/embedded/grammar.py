"""The language of the embedded targets: ten kinds of request, with training and test disjoint.

Every request has a *content*, the words and numbers that its prompt and its answer both spell out. A hash
of the content decides the split, so a test prompt cannot be a training prompt and a test answer cannot be
a training answer: equal texts would have equal contents. Stories and letters also contain words that the
content leaves open, so their text is not a function of the prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

from draftline.embedded.words import (
    ACTIONS,
    ANIMALS,
    CITIES,
    COLORS,
    MOODS,
    NAMES,
    PARAMETERS,
    PLACES,
    RELATIONS,
    SIZES,
    THINGS,
    WEATHER,
)

Split = Literal["train", "test"]
Content = tuple[str, ...]

HELD_OUT_ONE_IN = 8
"""One content in so many belongs to the test split."""


@dataclass(frozen=True)
class Task:
    """One kind of request."""

    name: str
    draw: Callable[[Random], Content]
    """Picks the content."""
    prompt: Callable[[Random, Content], str]
    """Words the request; spells out the whole content."""
    answer: Callable[[Random, Content], str]
    """Answers it; spells out the whole content again."""
    is_deterministic: bool = True
    """Whether the prompt leaves only one right answer."""


def is_held_out(task: str, content: Content) -> bool:
    """Whether a content belongs to the test split: a pure function of the content itself."""
    digest = hashlib.blake2b("\x1f".join((task, *content)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def sample(seed: int, index: int, split: Split) -> tuple[str, str]:
    """Request `index` of a stream: `(prompt, answer)`, a pure function of its arguments.

    The kinds take turns: request `index` is of kind `TASKS[index % len(TASKS)]`.
    """
    task = task_at(index)
    rng = Random(f"{seed}/{index}/{split}")  # noqa: S311 - a corpus, not a secret
    content = task.draw(rng)
    while is_held_out(task.name, content) != (split == "test"):
        content = task.draw(rng)
    return task.prompt(rng, content), task.answer(rng, content)


def task_at(index: int) -> Task:
    """The kind of request `index`."""
    return TASKS[index % len(TASKS)]


def _count_content(rng: Random) -> Content:
    first, step, steps = rng.randint(1, 150), rng.choice((1, 1, 2, 3, 5, 10)), rng.randint(4, 11)
    return str(first), str(step), str(first + step * steps)


def _count_prompt(rng: Random, content: Content) -> str:
    first, step, last = content
    plain = rng.choice((f"Count from {first} to {last}", f"List the numbers from {first} to {last}"))
    return f"{plain}." if step == "1" else f"{plain} in steps of {step}."


def _count_answer(_: Random, content: Content) -> str:
    first, step, last = map(int, content)
    return ", ".join(str(number) for number in range(first, last + 1, step)) + "."


def _sentence(rng: Random) -> Content:
    who = f"The {rng.choice(COLORS)} {rng.choice(ANIMALS)} {rng.choice(ACTIONS)}"
    what = f"the {rng.choice(SIZES)} {rng.choice(THINGS)} {rng.choice(RELATIONS)} the {rng.choice(PLACES)}."
    return (f"{who} {what}",)


def _repeat_prompt(rng: Random, content: Content) -> str:
    return rng.choice(("Repeat: ", "Say this again: ")) + content[0]


def _repeat_answer(_: Random, content: Content) -> str:
    return content[0]


def _nouns(rng: Random) -> Content:
    return tuple(rng.sample(ANIMALS + THINGS + PLACES, rng.randint(3, 7)))


def _bullets_prompt(rng: Random, content: Content) -> str:
    return rng.choice(("List as bullets: ", "Make a bullet list of ")) + ", ".join(content) + "."


def _bullets_answer(_: Random, content: Content) -> str:
    return "\n".join(f"- {word}" for word in content)


def _two_numbers(rng: Random) -> Content:
    return str(rng.randint(10, 499)), str(rng.randint(10, 499))


def _add_prompt(rng: Random, content: Content) -> str:
    left, right = content
    return rng.choice((f"What is {left} + {right}?", f"Add {left} and {right}."))


def _add_answer(_: Random, content: Content) -> str:
    """Column addition, because a small model adds well only when it may write the carries down."""
    left, right = map(int, content)
    lines, carry = [], 0
    for place, unit in (("Ones", 1), ("Tens", 10), ("Hundreds", 100)):
        digits = left // unit % 10, right // unit % 10
        column = sum(digits) + carry
        lines.append(f"{place}: {digits[0]} + {digits[1]} + {carry} = {column}.")
        carry = column // 10
    return "\n".join([*lines, f"So {left} + {right} = {left + right}."])


def _person(rng: Random) -> Content:
    return rng.choice(NAMES), str(rng.randint(5, 99)), rng.choice(CITIES), rng.choice(COLORS)


def _json_prompt(rng: Random, content: Content) -> str:
    name, age, city, color = content
    verb = rng.choice(("Make JSON", "Write as JSON"))
    return f"{verb}: {name} is {age}, lives in {city} and likes {color}."


def _json_answer(_: Random, content: Content) -> str:
    name, age, city, color = content
    return f'{{"name": "{name}", "age": {age}, "city": "{city}", "color": "{color}"}}'


def _table_rows(rng: Random) -> Content:
    names = rng.sample(NAMES, rng.randint(2, 3))
    return tuple(f"{name} {rng.randint(1, 99)} {rng.choice(THINGS)}" for name in names)


def _table_prompt(rng: Random, content: Content) -> str:
    return rng.choice(("Make a table: ", "Show as a table: ")) + "; ".join(content) + "."


def _table_answer(_: Random, content: Content) -> str:
    rows = ["| " + " | ".join(row.split()) + " |" for row in content]
    return "\n".join(["| name | number | item |", "| --- | --- | --- |", *rows])


_FUNCTIONS = {
    "add": ("the sum of {} and {}", "    return {} + {}"),
    "subtract": ("{} minus {}", "    return {} - {}"),
    "multiply": ("the product of {} and {}", "    return {} * {}"),
    "divide": ("{} divided by {}", "    return {} / {}"),
    "equal": ("whether {} equals {}", "    return {} == {}"),
    "larger": ("the larger of {} and {}", "    if {0} > {1}:\n        return {0}\n    return {1}"),
    "smaller": ("the smaller of {} and {}", "    if {0} < {1}:\n        return {0}\n    return {1}"),
    "pair": ("a list of {} and {}", "    return [{}, {}]"),
    "power": (
        "{} to the power of {}",
        "    result = 1\n    for _ in range({1}):\n        result *= {0}\n    return result",
    ),
}


def _function(rng: Random) -> Content:
    return rng.choice(list(_FUNCTIONS)), *rng.sample(PARAMETERS, 2)


def _function_prompt(rng: Random, content: Content) -> str:
    name, left, right = content
    return rng.choice(("Write a Python function", "Define a function")) + f" {name} of {left} and {right}."


def _function_answer(_: Random, content: Content) -> str:
    name, *parameters = content
    summary, body = (template.format(*parameters) for template in _FUNCTIONS[name])
    return f'def {name}({", ".join(parameters)}):\n    """Return {summary}."""\n{body}'


def _sorted_nouns(rng: Random) -> Content:
    return tuple(sorted(_nouns(rng)))


def _sort_prompt(rng: Random, content: Content) -> str:
    words = ", ".join(rng.sample(content, len(content)))
    return rng.choice((f"Sort: {words}.", f"Put in alphabetical order: {words}."))


def _sort_answer(_: Random, content: Content) -> str:
    return ", ".join(content) + "."


def _story_content(rng: Random) -> Content:
    return rng.choice(NAMES), rng.choice(SIZES), rng.choice(ANIMALS + THINGS)


def _story_prompt(rng: Random, content: Content) -> str:
    name, size, subject = content
    return rng.choice(("Tell", "Write")) + f" a story about {name} and the {size} {subject}."


def _story_answer(rng: Random, content: Content) -> str:
    name, size, subject = content
    home, away = rng.sample(PLACES, 2)
    friend = rng.choice([other for other in NAMES if other != name])
    lost = rng.choice(
        (f"the {subject} was gone", f"{name} lost the {subject}", f"{friend} took the {subject} away")
    )
    found = rng.choice(
        (f"{friend} found it", f"{name} saw it", f"a {rng.choice(COLORS)} {rng.choice(ANIMALS)} found it")
    )
    return (
        f"Once upon a time {name} had a {size} {subject} in the {home}. "
        f"Every {rng.choice(WEATHER)} day {name} went with it to the {away}. "
        f"One {rng.choice(WEATHER)} day {lost}, and {name} was very {rng.choice(MOODS)}. "
        f"Then {found} {rng.choice(RELATIONS)} the {rng.choice(PLACES)}. "
        f"{name} and {friend} were {rng.choice(MOODS)} again. The end."
    )


def _letter_content(rng: Random) -> Content:
    return *rng.sample(NAMES, 2), rng.choice(PLACES)


def _letter_prompt(rng: Random, content: Content) -> str:
    sender, receiver, place = content
    return (
        rng.choice(("Write a letter", "Compose a note")) + f" from {sender} to {receiver} about the {place}."
    )


def _letter_answer(rng: Random, content: Content) -> str:
    sender, receiver, place = content
    return (
        f"Dear {receiver},\nToday it is {rng.choice(WEATHER)} and I am at the {place}. "
        f"There is a {rng.choice(COLORS)} {rng.choice(ANIMALS)} {rng.choice(RELATIONS)} "
        f"the {rng.choice(THINGS)}. It is {rng.choice(MOODS)} and {rng.choice(SIZES)}. "
        f"Please bring a {rng.choice(SIZES)} {rng.choice(THINGS)} when you visit.\nYours,\n{sender}"
    )


TASKS = (
    Task("count", _count_content, _count_prompt, _count_answer),
    Task("repeat", _sentence, _repeat_prompt, _repeat_answer),
    Task("bullets", _nouns, _bullets_prompt, _bullets_answer),
    Task("add", _two_numbers, _add_prompt, _add_answer),
    Task("json", _person, _json_prompt, _json_answer),
    Task("table", _table_rows, _table_prompt, _table_answer),
    Task("function", _function, _function_prompt, _function_answer),
    Task("sort", _sorted_nouns, _sort_prompt, _sort_answer),
    Task("story", _story_content, _story_prompt, _story_answer, is_deterministic=False),
    Task("letter", _letter_content, _letter_prompt, _letter_answer, is_deterministic=False),
)
"""All kinds of request, in the order in which they take turns."""
