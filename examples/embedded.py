"""The runtime in your own process: the calls that the servers make, without a server."""

from kakeya.config import CacheConfig, EngineConfig
from kakeya.runtime import Runtime
from kakeya.text import Detokenizer
from kakeya.types import SamplingParams, TokenEvent


def main() -> None:
    config = EngineConfig(cache=CacheConfig(window=256), capacity=1)
    with Runtime.open(config=config) as runtime:  # the default model; fetched if it is not here yet
        session = runtime.create_session()
        runtime.append(session, runtime.tokenizer.encode("The three largest rivers of Europe are"))
        text = Detokenizer(runtime.tokenizer)
        for event in runtime.generate(session, 30, SamplingParams(repetition_penalty=1.1)):
            if isinstance(event, TokenEvent):
                print(text.feed(event.token_id), end="", flush=True)
        info = runtime.info(session)
        print(
            f"{text.finish()}\n{info.history_length} tokens, {info.kv_live_bytes:,} bytes of keys and values"
        )


if __name__ == "__main__":
    main()
