"""Generated pairs of sentences for 02_text_classification.ipynb, where it can't download any."""

import os
import random
import urllib.error
import urllib.request

SUBJECTS = [
    "Maria",
    "Mr Chen",
    "the old captain",
    "our neighbour",
    "Amina",
    "the new teacher",
    "my brother",
    "Dr Weiss",
]
DEEDS = [
    ("bought", "a red bicycle", "{0} was bought by {1}"),
    ("repaired", "the broken radio", "{0} was mended by {1}"),
    ("painted", "a small boat", "{0} got a coat of paint from {1}"),
    ("lost", "a silver watch", "{0} went missing from {1}"),
    ("sold", "three sacks of apples", "{0} were sold off by {1}"),
    ("found", "an ancient coin", "{0} was discovered by {1}"),
    ("carried", "a heavy ladder", "{0} was hauled by {1}"),
    ("photographed", "two grey herons", "{0} had their picture taken by {1}"),
]
PLACES = [
    ("in the harbour", "down by the docks"),
    ("at the market", "between the stalls of the market"),
    ("near the school", "a few steps from the school"),
    ("behind the church", "at the back of the church"),
    ("in the garden", "out in the garden"),
]
TIMES = [
    ("on Monday", "at the start of the week"),
    ("last summer", "in the summer of last year"),
    ("at dawn", "when the sun rose"),
]


def make_pairs(count, seed):
    """Return ``count`` pairs as dicts with ``sentence1``, ``sentence2`` and ``label``: 1 where both mean the same."""
    draw = random.Random(seed)
    return [make_pair(draw) for _ in range(count)]


def make_pair(draw):
    """Return one pair: a sentence and its paraphrase, in which one fact differs if the label is 0."""
    who, deed, place, time = (draw.choice(choices) for choices in (SUBJECTS, DEEDS, PLACES, TIMES))
    first = f"{who} {deed[0]} {deed[1]} {place[0]} {time[0]}."
    label = draw.randrange(2)
    if label == 0:
        changed = draw.choice(["who", "deed", "place"])
        who = other(SUBJECTS, who, draw) if changed == "who" else who
        deed = other(DEEDS, deed, draw) if changed == "deed" else deed
        place = other(PLACES, place, draw) if changed == "place" else place
    second = f"{deed[2].format(deed[1], who)} {place[1]}"
    second = f"{time[1]}, {second}." if draw.random() < 0.5 else f"{second} {time[1]}."
    return {
        "sentence1": first[0].upper() + first[1:],
        "sentence2": second[0].upper() + second[1:],
        "label": label,
    }


def other(choices, than, draw):
    """Return one of ``choices`` that is not ``than``."""
    return draw.choice([choice for choice in choices if choice != than])


def hub_responds():
    """Return whether huggingface.co can be reached."""
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        return False
    try:
        return urllib.request.urlopen("https://huggingface.co", timeout=3).status == 200
    except (urllib.error.URLError, TimeoutError):
        return False
