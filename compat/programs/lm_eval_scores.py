"""lm-eval: it scores texts over completions and generates over chat completions."""

import os
import sys

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

URL, MODEL, TOKENIZER = os.environ["KAKEYA_URL"], os.environ["KAKEYA_MODEL"], sys.argv[1]

scorer = LocalCompletionsAPI(
    base_url=f"{URL}/v1/completions", model=MODEL, tokenizer=TOKENIZER, num_concurrent=1
)
pairs = [("The capital of France is", " Paris"), ("The capital of France is", " carrot")]
asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
(likely, _), (unlikely, _) = scorer.loglikelihood(asked)
assert 0 > likely > unlikely, (likely, unlikely)

talker = LocalChatCompletion(base_url=f"{URL}/v1/chat/completions", model=MODEL, num_concurrent=1)
asking = talker.apply_chat_template([{"role": "user", "content": "Name a river."}])
question = Instance("generate_until", {}, (asking, {"until": ["\n"], "max_gen_toks": 20}), 0)
[said] = talker.generate_until([question])
assert isinstance(said, str)
sys.stdout.write(f"{likely:.2f} against {unlikely:.2f}; {said!r}\n")
