"""Many agents at once: each has its own session, and every engine step computes a token for each."""

import asyncio
import sys
import time

import kakeya

TOWNS = ("Paris", "Rome", "Lima", "Oslo", "Cairo", "Delhi", "Quito", "Seoul")


async def guide(client: kakeya.AsyncClient, town: str) -> tuple[str, int]:
    """What the guide of a town says, and in how many tokens."""
    async with await client.create_session(system=f"You are a guide in {town}.", label=town) as session:
        answer = [
            piece async for piece in session.chat("Where are we?", max_tokens=32, repetition_penalty=1.1)
        ]
        assert session.last_result is not None
        return "".join(answer), session.last_result.generated_token_count


async def main(address: str = "127.0.0.1:50051") -> None:
    async with kakeya.AsyncClient(address) as client:
        started = time.monotonic()
        answers = await asyncio.gather(*(guide(client, town) for town in TOWNS))
        seconds = time.monotonic() - started
    for town, (answer, _) in zip(TOWNS, answers, strict=True):
        print(f"{town}: {answer!r}")
    tokens = sum(count for _, count in answers)
    print(
        f"{len(TOWNS)} agents, {tokens} tokens in {seconds:.1f} s, {tokens / seconds:.0f} tokens/s together"
    )


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
