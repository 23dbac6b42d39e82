"""A conversation of 300 turns with OpenAI's client: what was said in passing is asked for far later.

Start the server with a small window, once with recall and once without:

    kakeya serve --window 512 --recall 256
    python examples/long_conversation.py http://127.0.0.1:8000/v1 300 transcript.json
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI

# What is told, what it becomes later if it changes, the question, and what a right answer has in it: ways to
# write it, with bars between them.
FACTS: tuple[tuple[str, str | None, str, str], ...] = (
    ("My sister's name is Ingrid.", None, "What is my sister's name?", "Ingrid"),
    ("My dog is called Ziggy.", None, "What is my dog called?", "Ziggy"),
    (
        "My flight to Lisbon leaves on 14 March.",
        None,
        "When does my flight to Lisbon leave?",
        "14 March|March 14",
    ),
    ("My favourite tea is jasmine tea.", None, "What is my favourite tea?", "jasmine"),
    ("The code of the garage door is 4817.", None, "What is the code of the garage door?", "4817"),
    ("My brother Oskar lives in Tampere.", None, "Where does my brother Oskar live?", "Tampere"),
    ("My shopping list is: eggs, flour and candles.", None, "What is on my shopping list?", "candles"),
    (
        "My dentist appointment is on 3 May.",
        "My dentist appointment was moved: it is now on 19 June.",
        "When is my dentist appointment?",
        "19 June|June 19",
    ),
    (
        "The hotel in Porto is called Aurora.",
        "I booked another hotel in Porto: it is called Belvedere.",
        "What is the hotel in Porto called?",
        "Belvedere",
    ),
    (
        "My present for Clara is a blue scarf.",
        "I changed my mind: my present for Clara is a red kite.",
        "What is my present for Clara?",
        "kite",
    ),
)
TOPICS = (
    "rain bridges bread whales clocks chess volcanoes pencils trams honey maps owls glass salt violins "
    "deserts kites paper lighthouses comets moss harbours spices snow windmills bees libraries rivers "
    "mirrors wool castles ferries mushrooms opera compasses gardens gravity marble falcons soap"
)
WAYS = (
    "Tell me one short thing about {}.",
    "Why do people like {}? One sentence, please.",
    "Say something kind about {}.",
    "What would a child ask about {}?",
    "I thought about {} on my way home today. What comes to your mind?",
    "Is there a proverb about {}?",
    "Give me a title for a poem about {}.",
    "How would you explain {} to a visitor?",
)


def script(turns: int) -> list[dict[str, Any]]:
    """What the user says. Facts come in the first quarter, changes in the second, questions in the last."""
    chance = random.Random(17)
    talk = [way.format(topic) for way in WAYS for topic in TOPICS.split()]
    chance.shuffle(talk)
    said: list[dict[str, Any]] = [{"text": text} for text in (talk * (1 + turns // len(talk)))[:turns]]
    few = max(1, min(len(FACTS), turns // 8))
    chosen = FACTS[:few] if few < len(FACTS) else FACTS
    quarter = turns // 4
    for number, (first, then, question, key) in enumerate(chosen):
        step = number * quarter // len(chosen)
        said[step] = {"text": f"Please remember this. {first}"}
        if then:
            said[quarter + step] = {"text": f"Please remember this. {then}"}
        said[3 * quarter + step] = {"text": question, "key": key}
    return said


SYSTEM = {"role": "system", "content": "You are a friend who listens. Answer in one short sentence."}


def main(url: str = "http://127.0.0.1:8000/v1", turns: str = "300", output: str = "") -> None:
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    transcript: list[dict[str, Any]] = []
    previous = None
    for number, turn in enumerate(script(int(turns)), start=1):
        said: Any = {"role": "user", "content": turn["text"]}
        reply = client.responses.create(
            model=model,
            input=[said] if previous else [SYSTEM, said],
            previous_response_id=previous,
            max_output_tokens=20,
            # Small models go round in circles when they chat greedily.
            temperature=0 if "key" in turn else 0.8,
        )
        previous = reply.id
        usage = reply.usage.model_dump() if reply.usage else {}
        line = {"turn": number, "user": turn["text"], "assistant": reply.output_text}
        line["recalled_tokens"] = usage.get("recalled_tokens", 0)
        if "key" in turn:
            line |= judged(turn["key"], reply.output_text, usage.get("recalled", []))
            print(number, turn["text"], repr(reply.output_text), line["found"], line["right"])
        transcript.append(line)
    asked = [line for line in transcript if "right" in line]
    score = {name: sum(line[name] for line in asked) for name in ("found", "right")}
    print(f"{score['found']} found, {score['right']} right of {len(asked)} asked in {turns} turns")
    if output:
        report = {"model": model, "asked": len(asked), **score, "transcript": transcript}
        Path(output).write_text(json.dumps(report, ensure_ascii=False, indent=0) + "\n")


def judged(key: str, answer: str, recalled: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether the answer has what was asked for, and whether what the session saw again has it."""
    texts = [each["text"] for each in recalled]
    ways = key.lower().split("|")
    found, right = (any(way in each.lower() for way in ways for each in said) for said in (texts, [answer]))
    return {"expected": key, "found": found, "right": right, "recalled": texts}


if __name__ == "__main__":
    main(*sys.argv[1:])
