"""Prompts for a real chat model: topics crossed with tasks, some topics held out.

No third-party text. The topics with the smallest hashes are held out: no training prompt is about them.
"""

from __future__ import annotations

import hashlib
from random import Random

NUM_HELD_OUT_TOPICS = 25

_TOPIC_LIST = """
gravity, tides, comets, the solar system, sunlight, thunderstorms, fog, seasons, rivers, waterfalls,
volcanoes, earthquakes, caves, deserts, swamps, coral reefs, glaciers, mountains, forests, meadows, oak
trees, roses, mushrooms, bees, ants, spiders, owls, eagles, salmon, sharks, whales, elephants, wolves,
horses, cats, dogs, dinosaurs, fossils, bacteria, viruses, the heart, the lungs, the brain, muscles,
sleep, dreams, memory, laughter, fear, friendship, bread, cheese, soup, rice, apples, chocolate, coffee,
tea, honey, salt, bicycles, trains, sailing ships, airplanes, rockets, bridges, tunnels, windmills,
clocks, compasses, microscopes, telescopes, cameras, batteries, electric motors, solar panels, robots,
computers, keyboards, printers, the internet, passwords, databases, spreadsheets, Python functions,
loops, recursion, sorting, binary search, graphs, prime numbers, fractions, triangles, circles,
averages, percentages, probability, algebra, geometry, statistics, money, savings, taxes, trade,
markets, farming, fishing, mining, pottery, weaving, painting, sculpture, poetry, novels, theater,
movies, jazz, the violin, choirs, dancing, chess, football, tennis, swimming, running, hiking, camping,
yoga, gardening, photography, ancient Egypt, the Roman Empire, the Vikings, castles, the printing press,
steam engines, elections, courts, schools, libraries, museums, hospitals, letters, newspapers, maps,
calendars, alphabets, languages
"""

TOPICS = tuple(" ".join(topic.split()) for topic in _TOPIC_LIST.split(","))

TASKS = (
    "Explain {} in simple words.",
    "What should everyone know about {}?",
    "Give me five facts about {}.",
    "Tell me a short story that has to do with {}.",
    "Write a poem of four lines about {}.",
    "Why do people care about {}?",
    "List ten words that belong to {}.",
    "Describe {} to a child.",
    "Write a short paragraph about the history of {}.",
    "Give three tips to someone who is new to {}.",
    "What are the good and the bad sides of {}?",
    "Summarize {} in one sentence.",
    "Write two quiz questions about {}, with answers.",
    "What do many people get wrong about {}?",
    "Write a conversation between a teacher and a student about {}.",
    "Suggest a title and an opening sentence for an essay about {}.",
    "How have {} and everyday life changed each other?",
    "Which questions about {} are still open?",
    "Write a short email that invites a friend to a talk about {}.",
    "Plan a lesson of thirty minutes about {}.",
)


def training_prompts() -> list[str]:
    """Every task with every topic that is not held out, in a fixed shuffled order."""
    return _prompts(_topics_by_hash()[NUM_HELD_OUT_TOPICS:])


def held_out_prompts() -> list[str]:
    """Every task with the 25 held-out topics, in a fixed shuffled order."""
    return _prompts(_topics_by_hash()[:NUM_HELD_OUT_TOPICS])


def _topics_by_hash() -> list[str]:
    return sorted(TOPICS, key=lambda topic: hashlib.sha256(topic.encode()).digest())


def _prompts(topics: list[str]) -> list[str]:
    prompts = [task.format(topic) for topic in topics for task in TASKS]
    Random(0).shuffle(prompts)  # noqa: S311 - an order, not a secret
    return prompts
