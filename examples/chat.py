"""A conversation over gRPC: the server keeps the history, so a turn computes only what is new."""

import sys

import kakeya

QUESTIONS = ("Name a river in France.", "Which sea does it flow into?")


def main(address: str = "127.0.0.1:50051") -> None:
    with kakeya.Client(address) as client, client.create_session(system="You are brief.") as session:
        for question in QUESTIONS:
            print(f"> {question}")
            for piece in session.chat(question, max_tokens=40, repetition_penalty=1.1):
                print(piece, end="", flush=True)
            assert session.last_result is not None
            print(f"\n  ({session.last_result.cached_token_count} tokens were not computed again)")
        info = session.info()
        print(
            f"The session holds {info.history_length} tokens in {info.kv_capacity_bytes:,} bytes, for ever."
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
