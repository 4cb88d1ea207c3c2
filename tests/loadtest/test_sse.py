from hypothesis import given
from hypothesis import strategies as st

from loadtest.sse import DONE, EventParser

STREAM = b': hello\n\ndata: {"a": 1}\n\nevent: x\ndata:{"b":\ndata: 2}\nid: 7\n\nretry: 10\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a": 1}', b'{"b":\n2}', DONE]


@given(cuts=st.lists(st.integers(0, len(STREAM) * 2)), line_end=st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_same_events_however_the_bytes_are_cut_and_lines_end(cuts: list[int], line_end: bytes) -> None:
    stream = STREAM.replace(b"\n", line_end)
    parser, events, start = EventParser(), [], 0
    for cut in [*sorted(min(cut, len(stream)) for cut in cuts), len(stream)]:
        events += parser.feed(stream[start:cut])
        start = cut
    assert events + parser.finish() == EVENTS


def test_event_is_given_with_the_bytes_that_complete_it() -> None:
    parser = EventParser()
    assert parser.feed(b"data: 1\r\n\r") == []
    assert parser.feed(b"\n") == [b"1"]


def test_last_blank_line_may_be_missing() -> None:
    parser = EventParser()
    assert parser.feed(b"data: 1\n\ndata: [DONE]\n") == [b"1"]
    assert parser.finish() == [DONE]
    assert parser.finish() == []


def test_cut_line_is_no_event() -> None:
    parser = EventParser()
    assert parser.feed(b'data: {"a"') == []
    assert parser.finish() == []


def test_event_without_data_is_skipped() -> None:
    assert EventParser().feed(b"event: ping\n\n\n: comment\n\ndata: 1\n\n") == [b"1"]
