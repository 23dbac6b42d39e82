"""Fingerprints of models: sessions are saved under them."""

from dataclasses import replace

from kakeya.models.fingerprint import fingerprint
from kakeya.models.rope import DivisorScaling, RopeConfig
from support.tiny import parse_config


def test_later_fields_leave_earlier_fingerprints_as_they_were() -> None:
    """Sessions are saved under them."""
    assert (
        fingerprint(parse_config(), ()) == "891dc106c71e026a6d609d8ec3557f00d9942c0e4caf296e0c42091f086f0e5b"
    )
    qwen3 = fingerprint(parse_config(model_type="qwen3"), ())
    assert qwen3 == "0cafc6fe4353b882339a68221747723a9f30d24e0e86b1f051f9b9eddb5b26a9"
    plain = parse_config(model_type="phi3")
    assert fingerprint(plain, ()) != fingerprint(replace(plain, family="llama"), ())
    divided = [
        replace(plain, layer_ropes=(RopeConfig(1e4, 16, DivisorScaling((2.0,) * 8, factor)),) * 4)
        for factor in (1.0, 1.5)
    ]
    assert fingerprint(divided[0], ()) != fingerprint(divided[1], ())
    assert fingerprint(parse_config(partial_rotary_factor=0.5), ()) != fingerprint(parse_config(), ())
