"""Wire: golden bytes written by hand from the protocol page, round trips, hostile frames."""

from __future__ import annotations

import re
import struct
import sys
from array import array
from dataclasses import replace

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec
from protocol import messages as m
from protocol.codec import WireError
from protocol.sampling import SamplingParams


def frame(kind: int, header: bytes, columns: bytes = b"") -> bytes:
    """A frame as the page lays it out, built without the codec."""
    return bytes([kind]) + len(header).to_bytes(4, "little") + header + columns


#: As deep as orjson goes: deeper than Python prints.
DEEP = b"[" * 1000 + b"]" * 1000

SUBMIT_HEADER = (
    b'{"handle":7,"request_id":"r-1","traceparent":"","num_prompt":3,"num_generated":1,"sampling":{"max_tokens":5,'
    b'"temperature":0.5},"seed":-2,"priority":0,"salt":"","resume":true,"num_allowed":0,"num_bias":1}'
)
SUBMIT_COLUMNS = (
    b"\x01\x00\x00\x00\x02\x00\x00\x00\x03\x00\x00\x00"  # prompt ids 1 2 3
    b"\xff\xff\x00\x00"  # generated id 65535
    b"\x09\x00\x00\x00"  # bias id 9
    b"\x00\x00\x80\x3f"  # bias 1.0
)
SUBMIT_FRAME = frame(4, SUBMIT_HEADER, SUBMIT_COLUMNS)
SUBMIT = m.Submit(
    handle=7,
    request_id="r-1",
    prompt_ids=m.u32([1, 2, 3]),
    generated_ids=m.u32([65535]),
    sampling=SamplingParams(max_tokens=5, temperature=0.5, logit_bias=((9, 1.0),)),
    seed=-2,
    resume=True,
)

STEP_FRAME = frame(
    8,
    b'{"step":9,"num_entries":2,"num_tokens":3,"num_logprobs":1}',
    b"\x07\x00\x00\x00\x08\x00\x00\x00"  # handles 7 8
    b"\x00\x00\x00\x00\x05\x00\x00\x00"  # first indices 0 5
    b"\x01\x00\x02\x00"  # counts 1 2
    b"\x0a\x00\x00\x00\x0b\x00\x00\x00\x0c\x00\x00\x00"  # ids 10 11 12
    b"\x00\x00\x80\xbf\x00\x00\x00\xc0\x00\x00\x40\xc0"  # own logprobs -1 -2 -3
    b"\x01\x00\x00\x00\x02\x00\x00\x00\x03\x00\x00\x00"  # ranks 1 2 3
    b"\x0a\x00\x00\x00\x14\x00\x00\x00\x1e\x00\x00\x00"  # top ids 10 20 30
    b"\x00\x00\x80\xbf\x00\x00\x00\xbf\x00\x00\x80\xbe",  # top logprobs -1 -0.5 -0.25
)
STEP = m.Step(
    step=9,
    handles=m.u32([7, 8]),
    firsts=m.u32([0, 5]),
    counts=array("H", [1, 2]),
    ids=m.u32([10, 11, 12]),
    logprobs=m.Logprobs(1, m.f32([-1, -2, -3]), m.u32([1, 2, 3]), m.u32([10, 20, 30]), m.f32([-1.0, -0.5, -0.25])),
)

PROMPT_LOGPROBS_FRAME = frame(
    9,
    b'{"handle":7,"first":3,"count":2,"k":2}',
    b"\x00\x00\x80\xbf\x00\x00\x00\xc0"  # own logprobs -1 -2
    b"\x01\x00\x00\x00\x05\x00\x00\x00"  # ranks 1 5
    b"\x0a\x00\x00\x00\x0b\x00\x00\x00\x14\x00\x00\x00\x15\x00\x00\x00"  # top ids 10 11, 20 21
    b"\x00\x00\x80\xbf\x00\x00\x00\xc0\x00\x00\x00\xbf\x00\x00\x80\xbf",  # top logprobs -1 -2, -0.5 -1
)
PROMPT_LOGPROBS = m.PromptLogprobs(
    handle=7,
    first=3,
    logprobs=m.Logprobs(2, m.f32([-1, -2]), m.u32([1, 5]), m.u32([10, 11, 20, 21]), m.f32([-1.0, -2.0, -0.5, -1.0])),
)

WELCOME_FRAME = frame(
    2,
    b'{"protocol":[1,0],"engine_id":"e","epoch":18446744073709551615,"phase":"serving","model":"smol","version":"v1",'
    b'"digest":"d","numerics":"n","bundle":"' + b"ab" * 32 + b'","vocab_size":49152,"context_length":8192,'
    b'"block_size":16,"num_blocks":100,"max_num_seqs":64,"eos_ids":[2],"generation_defaults":{"top_k":20},'
    b'"grant_requests":128,"grant_tokens":32768,"max_logprobs":20,"features":[],"hang_timeout_ms":10000}',
)
WELCOME = m.Welcome(
    protocol=(1, 0),
    engine_id="e",
    epoch=2**64 - 1,
    phase=m.Phase.SERVING,
    serving=m.Serving(
        model="smol",
        version="v1",
        digest="d",
        numerics="n",
        bundle="ab" * 32,
        vocab_size=49152,
        context_length=8192,
        block_size=16,
        num_blocks=100,
        max_num_seqs=64,
        eos_ids=(2,),
        generation_defaults={"top_k": 20},
        grant_requests=128,
        grant_tokens=32768,
        max_logprobs=20,
        hang_timeout_ms=10000,
    ),
)

FROM_GATEWAY = [
    (
        frame(1, b'{"protocol":[1,0],"role":"gateway","name":"gw-1","build":"0.1.0","auth":"","beat_ms":250}'),
        m.Hello((1, 0), m.Role.GATEWAY, "gw-1", "0.1.0"),
    ),
    (SUBMIT_FRAME, SUBMIT),
    (frame(5, b'{"handle":4294967295,"reason":"stop_string"}'), m.Abort(2**32 - 1, m.AbortReason.STOP_STRING)),
    (frame(6, b'{"seq":3}'), m.GatewayBeat(3)),
    (frame(12, b'{"sha256":"' + b"0f" * 32 + b'"}'), m.BundleRequest("0f" * 32)),
]
FROM_ENGINE = [
    (
        frame(2, b'{"protocol":[1,0],"engine_id":"e","epoch":1,"phase":"loading"}'),
        m.Welcome((1, 0), "e", 1, m.Phase.LOADING),
    ),
    (WELCOME_FRAME, WELCOME),
    (
        frame(3, b'{"code":"account_lost","text":"silent"}'),
        m.Reject(m.RejectCode.ACCOUNT_LOST, "silent"),
    ),
    (
        frame(
            6,
            b'{"seq":1,"phase":"serving","step":2,"step_age_ms":3,"longest_step_ms":4,"running":5,"waiting":6,'
            b'"free_blocks":7,"grant_requests":8,"grant_tokens":9,"totals":{"generated":1,"prompt":2,'
            b'"prefix_queries":3,"prefix_hits":4,"preemptions":5,"aborted":6,"finished":7}}',
        ),
        m.EngineBeat(1, m.Phase.SERVING, 2, 3, 4, 5, 6, 7, 8, 9, m.Totals(1, 2, 3, 4, 5, 6, 7)),
    ),
    (frame(7, b'{"handle":7,"cached_tokens":32,"queue_ms":5}'), m.Admitted(7, 32, 5)),
    (STEP_FRAME, STEP),
    (PROMPT_LOGPROBS_FRAME, PROMPT_LOGPROBS),
    (
        frame(10, b'{"handle":7,"reason":"stop","stop_id":2,"num_prompt":3,"num_cached":0,"num_generated":4}'),
        m.Finished(7, m.FinishReason.STOP, 3, 0, 4, stop_id=2),
    ),
    (
        frame(
            10,
            b'{"handle":7,"reason":"error","num_prompt":3,"num_cached":0,"num_generated":0,'
            b'"error":{"code":"too_long","text":"9 tokens"}}',
        ),
        m.Finished(7, m.FinishReason.ERROR, 3, 0, 0, error=m.Failure(m.ErrorCode.TOO_LONG, "9 tokens")),
    ),
    (
        frame(13, b'{"sha256":"' + b"0f" * 32 + b'","offset":2,"total":5}', b"abc"),
        m.BundlePart("0f" * 32, 2, 5, b"abc"),
    ),
]


def submit_with(old: bytes, new: bytes) -> bytes:
    """The golden Submit with a part of its header replaced."""
    assert old in SUBMIT_HEADER
    return frame(4, SUBMIT_HEADER.replace(old, new), SUBMIT_COLUMNS)


def canonical(raw: bytes) -> tuple[int, object, bytes]:
    """Kind, header as an object (key order has no meaning) and columns."""
    end = 5 + int.from_bytes(raw[1:5], "little")
    return raw[0], orjson.loads(raw[5:end]), raw[end:]


@pytest.mark.parametrize(("raw", "message"), FROM_GATEWAY)
def test_golden_bytes_from_a_gateway(raw, message):
    assert codec.decode_from_gateway(raw) == message
    assert codec.decode_from_gateway(codec.encode(message)) == message


@pytest.mark.parametrize(("raw", "message"), FROM_ENGINE)
def test_golden_bytes_from_an_engine(raw, message):
    assert codec.decode_from_engine(raw) == message
    assert codec.decode_from_engine(codec.encode(message)) == message


@pytest.mark.parametrize(
    ("raw", "message"),
    [row for row in FROM_GATEWAY + FROM_ENGINE if row[0] is not SUBMIT_FRAME],
)
def test_encoding_gives_the_golden_header_and_columns(raw, message):
    assert canonical(codec.encode(message)) == canonical(raw)


@pytest.mark.parametrize("message", [message for _, message in FROM_GATEWAY + FROM_ENGINE if message is not None])
def test_encoding_leaves_nothing_behind(message):
    """Not even in CPython's free lists, where `dataclasses.fields` leaves a tuple with every call."""
    codec.encode(message)
    before = sys.getallocatedblocks()
    for _ in range(100):
        codec.encode(message)
    assert sys.getallocatedblocks() - before < 50


def test_a_submit_leaves_out_sampling_defaults_and_keeps_its_columns():
    kind, header, columns = canonical(codec.encode(SUBMIT))
    assert (kind, columns) == (4, SUBMIT_COLUMNS)
    assert header["sampling"] == {"max_tokens": 5, "temperature": 0.5}
    assert (header["num_prompt"], header["num_generated"], header["num_bias"]) == (3, 1, 1)


def test_a_submit_keeps_what_it_asks_of_the_prompt_and_its_bad_words():
    sampling = SamplingParams(prompt_logprobs=3, bad_words=((5,), (6, 7)))
    submit = replace(SUBMIT, sampling=sampling, prompt_logprobs_from=2)
    raw = codec.encode(submit)
    header = canonical(raw)[1]
    assert header["sampling"] == {"prompt_logprobs": 3, "bad_words": [[5], [6, 7]]}
    assert header["prompt_logprobs_from"] == 2
    assert codec.decode_from_gateway(raw) == submit


@pytest.mark.parametrize("k", [1, 5, 20])
def test_the_most_rows_of_a_prompt_fit_a_frame(k):
    def slice_of(count: int) -> m.PromptLogprobs:
        rows = m.Logprobs(k, m.f32([0]) * count, m.u32([0]) * count, m.u32([0]) * count * k, m.f32([0]) * count * k)
        return m.PromptLogprobs(2**32 - 1, 2**31 - 1, rows)

    most = codec.most_prompt_rows(k)
    assert len(codec.encode(slice_of(most))) <= 2**20
    with pytest.raises(WireError, match="PROMPT_LOGPROBS"):
        codec.encode(slice_of(most + 1024))


def test_an_unknown_kind_is_ignored_and_an_unknown_header_key_too():
    assert codec.decode_from_gateway(frame(200, b"{}")) is None
    assert codec.decode_from_gateway(frame(6, b'{"seq":3,"future":[1]}')) == m.GatewayBeat(3)


def test_columns_that_a_later_minor_appends_are_ignored():
    assert codec.decode_from_engine(STEP_FRAME + b"\x00" * 8) == STEP


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "0 bytes"),
        (b"\x06\x00", "2 bytes"),
        (frame(6, b"{"), "BEAT: header is not JSON"),
        (frame(6, b"[]"), "BEAT: must be an object"),
        (b"\x06\xff\xff\xff\xff{}", "BEAT: header of 4294967295 bytes in a frame of 7"),
        (frame(6, b"{}"), "BEAT: seq is missing"),
        (frame(6, b'{"seq":true}'), "BEAT: seq must be an integer, got True"),
        (frame(6, b'{"seq":-1}'), "BEAT: seq must be between 0"),
        (frame(6, b'{"seq":1.0}'), "BEAT: seq must be an integer, got 1.0"),
        (frame(8, b"{}"), "STEP does not come from this side"),
        (frame(5, b'{"handle":1,"reason":"whim"}'), "ABORT: reason must be one of client"),
        (frame(1, b'{"protocol":' + DEEP + b"}"), "protocol must be a list of two, got [[[[[...]]]]]"),
        (frame(1, b'{"protocol":[1,0],"role":' + DEEP + b"}"), "HELLO: role must be one of gateway, operator, got [["),
        (frame(12, b'{"sha256":"../../etc/passwd"}'), "BUNDLE_REQUEST: sha256 must be 64 lower-case hex"),
        (frame(1, b'{"protocol":[1],"role":"gateway","name":"","build":""}'), "HELLO: protocol must be a list of two"),
        (frame(1, b'{"protocol":[1,0],"role":"gateway","name":"' + b"x" * 65 + b'","build":""}'), "at most 64"),
        (SUBMIT_FRAME[:-1], "SUBMIT: columns take 24 bytes, the frame has 23"),
        (submit_with(b'"num_prompt":3', b'"num_prompt":9999999'), "SUBMIT: columns take"),
        (submit_with(b'"num_prompt":3', b'"num_prompt":0'), "SUBMIT: num_prompt must be at least 1"),
        (submit_with(b'"temperature":0.5', b'"temperature":9.5'), "SUBMIT: temperature must be"),
        (submit_with(b'"temperature":0.5', b'"temperature":"x"'), "SUBMIT: temperature must be a number"),
        (submit_with(b'"temperature":0.5', b'"bad_words":[[1],2]'), "SUBMIT: bad_words must be a list of token ids"),
        (submit_with(b'"temperature":0.5', b'"bad_words":[[]]'), "SUBMIT: bad_words must not hold an empty list"),
        (
            submit_with(b'"temperature":0.5', b'"prompt_logprobs":21'),
            "SUBMIT: prompt_logprobs must be between 0 and 20",
        ),
        (frame(9, b"{}"), "PROMPT_LOGPROBS does not come from this side"),
        (frame(5, b'{"handle":1,"reason":"client","x":"' + b"y" * 1024 + b'"}'), "at most 1024 are allowed"),
    ],
)
def test_a_malformed_frame_is_refused_with_kind_and_field(raw, words):
    with pytest.raises(WireError, match=re.escape(words)):
        codec.decode_from_gateway(raw)


@pytest.mark.parametrize(
    ("defaults", "words"),
    [
        (b'{"top_k":[1]}', "must be a number, a string, true, false or null, got [1]"),
        (b'{"a":"' + b"x" * 257 + b'"}', "must have at most 256 characters"),
        (b"{" + b",".join(b'"%d":1' % number for number in range(65)) + b"}", "must have at most 64 entries, got 65"),
    ],
)
def test_generation_defaults_are_flat(defaults, words):
    raw = WELCOME_FRAME[5:].replace(b'{"top_k":20}', defaults)
    with pytest.raises(WireError, match=re.escape(f"WELCOME: generation_defaults {words}")):
        codec.decode_from_engine(frame(2, raw))


def test_a_step_whose_counts_do_not_add_up_is_refused():
    raw = STEP_FRAME.replace(b"\x01\x00\x02\x00", b"\x01\x00\x01\x00")
    with pytest.raises(WireError, match="STEP: counts add up to 2, num_tokens is 3"):
        codec.decode_from_engine(raw)


def test_a_message_over_its_bound_is_not_sent():
    with pytest.raises(WireError, match=r"REJECT: \d+ bytes, at most 4096"):
        codec.encode(m.Reject(m.RejectCode.AUTH, "x" * 5000))


def test_a_string_that_is_no_unicode_is_not_sent():
    with pytest.raises(WireError, match="REJECT"):
        codec.encode(m.Reject(m.RejectCode.AUTH, "\ud800"))


def assert_refused_or_decoded(raw: bytes) -> None:
    """Both decoders give a message, None or a WireError with a text; any other exception escapes."""
    for decode in (codec.decode_from_gateway, codec.decode_from_engine):
        refusal = ""
        try:
            message = decode(raw)
        except WireError as error:
            message, refusal = None, str(error)
        known = raw and raw[0] in set(m.Kind)
        assert (message is not None) or refusal or not known


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(list(m.Kind)), st.integers(0, 220))
def test_damaged_frames_never_raise_anything_but_wire_error(noise, kind, length):
    raw = struct.pack("<BI", kind, length) + noise
    assert_refused_or_decoded(raw)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from([raw for raw, _ in FROM_GATEWAY + FROM_ENGINE]), st.data())
def test_flipped_bytes_of_good_frames_never_raise_anything_but_wire_error(raw, data):
    damaged = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(damaged[: data.draw(st.integers(0, len(raw)))])
    assert_refused_or_decoded(bytes(damaged))
    assert_refused_or_decoded(cut)
