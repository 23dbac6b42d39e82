"""Streams that are recorded, so that they can be told again."""

from kakeya.sessions.recording import RecordedStream
from kakeya.types import DoneEvent, StopReason, TokenEvent
from support import tiny
from support.engines import Room


def test_a_recorded_answer_keeps_its_own_end_when_it_is_cancelled_too_late() -> None:
    stream = RecordedStream(lambda: None, 100)
    request = Room(tiny.engine_config()).start("someone", 5)
    request.stream = stream
    request.start()
    request.sequence.slab.written = 6
    for token_id in (11, 12):
        request.sequence.tokens.append(token_id)
        request.emit(TokenEvent(token_id))
    request.cached_tokens = 5
    request.finish(StopReason.EOS)
    taken = [stream.next_event(0), stream.next_event(0)]
    request.cancel()
    done = stream.next_event(0)
    assert isinstance(done, DoneEvent)
    assert (done.stop_reason, done.generated_token_count) == (StopReason.EOS, 2)
    replay = stream.replay()
    assert replay.cached_tokens == 5
    assert list(replay) == [*taken, done]
