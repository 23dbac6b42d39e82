"""What a client may ask of a generate."""

from collections.abc import Mapping, Sequence
from typing import TypedDict


class GenerateOptions(TypedDict, total=False):
    """What a generate may be asked, besides its length. What is left out is the server's default: greedy."""

    seed: int
    """Decides the randomness, together with each token's position."""
    temperature: float
    """0 is greedy."""
    top_p: float
    """Keep the likeliest tokens that together reach this probability."""
    top_k: int
    """Keep this many likeliest tokens; 0 keeps all."""
    min_p: float
    """Drop tokens less likely than this share of the likeliest one."""
    repetition_penalty: float
    """Divide the logits of recent tokens by this."""
    presence_penalty: float
    """Subtract this from the logits of tokens that occurred recently."""
    frequency_penalty: float
    """Subtract this from the logits of recent tokens, once for each occurrence."""
    logit_bias: Mapping[int, float]
    """Add these to the logits of these tokens."""
    logprobs: int
    """Report each token's log-probability and this many of the likeliest tokens, 0 to 20."""
    min_tokens: int
    """Choose no token that would end the generate before this many."""
    ignore_eos: bool
    """Let the session's EOS tokens be chosen like any other, and end nothing."""
    stop_token_ids: Sequence[int]
    """End with these tokens as well; the one that ends it is sent and kept."""
    timeout: float
    """Give up after this many seconds, over all retries and what a chat needs first. Left out: never."""
