"""A chain of Responses with OpenAI's client: `previous_response_id` continues or branches."""

import sys

from openai import OpenAI
from openai.types.responses import Response


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id

    def say(text: str, after: Response | None = None) -> Response:
        previous = None if after is None else after.id
        answer = client.responses.create(
            model=model, input=text, previous_response_id=previous, max_output_tokens=30
        )
        assert answer.usage is not None
        usage = answer.usage
        cached = usage.input_tokens_details.cached_tokens
        print(f"> {text}\n{answer.output_text}")
        print(f"  ({cached} of {usage.input_tokens} tokens were not computed again)")
        return answer

    story = say("Begin a story about a fox.")
    say("Go on, happily.", after=story)
    # The same beginning once more: every stored response can be continued any number of times.
    say("Go on, sadly.", after=story)


if __name__ == "__main__":
    main(*sys.argv[1:])
