from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.errors import BadRequest, ContextLengthExceeded
from gateway.preparation import Call, echoes, prepare_chat, prepare_completion
from gateway.schemas import parse_chat, parse_completion
from gateway.stream import GenerationRequest
from gateway.texts import ModelText
from protocol.messages import Serving, u32
from protocol.sampling import SamplingParams
from tests.gateway import vocabularies
from tests.gateway.stub_engines import StubGateway

GATEWAY = StubGateway(vocabularies.characters())
SERVING, TEXT = GATEWAY.serving, GATEWAY.text
CALL = Call("r-1", "")


async def completion(
    prompt: object, *, serving: Serving = SERVING, text: ModelText = TEXT, **fields: object
) -> GenerationRequest:
    request = parse_completion({"prompt": prompt} | fields, allow_unknown=False)
    return await prepare_completion(request, serving, text, CALL)


async def chat(content: str, *, serving: Serving = SERVING, **fields: object) -> GenerationRequest:
    request = parse_chat({"messages": [{"role": "user", "content": content}]} | fields, allow_unknown=False)
    return await prepare_chat(request, serving, TEXT, CALL)


async def test_a_chat_takes_the_rest_of_the_context() -> None:
    prepared = await chat("hi")
    assert TEXT.tokenizer.token_id("h") in prepared.prompts[0]
    assert len(prepared.prompts[0]) == len("user: hi\nassistant: ")
    assert prepared.sampling == SamplingParams(max_tokens=2048 - len(prepared.prompts[0]))
    assert (prepared.model, prepared.request_id, prepared.n, prepared.stream) == ("tiny", "r-1", 1, False)


async def test_a_completion_takes_16_tokens_or_what_is_left() -> None:
    assert (await completion("a" * 10)).sampling.max_tokens == 16
    assert (await completion("a" * 2040)).sampling.max_tokens == 8
    assert (await completion(["a", "a" * 2040])).sampling.max_tokens == 8


@pytest.mark.parametrize("max_tokens", [0, 8])
async def test_a_prompt_and_its_answer_may_fill_the_context(max_tokens: int) -> None:
    prepared = await completion("a" * (2048 - max_tokens), max_tokens=max_tokens)
    assert prepared.sampling.max_tokens == max_tokens


@pytest.mark.parametrize(
    ("num_prompt", "fields", "texts"),
    [
        (
            8,
            {"max_tokens": 2045},
            ("2048 tokens", "has 8 tokens", "max_tokens is 2045", "together 2053", "at most 2040"),
        ),
        (2048, {}, ("2048 tokens", "has 2048 tokens", "at most 2047")),
        (5000, {"max_tokens": 3}, ("2048 tokens", "has 5000 tokens", "max_tokens is 3", "at most 2047")),
    ],
)
async def test_what_does_not_fit_is_told_in_numbers(
    num_prompt: int, fields: dict[str, object], texts: tuple[str, ...]
) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        await completion("a" * num_prompt, **fields)
    assert caught.value.param == "prompt"
    assert all(text in str(caught.value) for text in texts)


async def test_chat_errors_name_the_clients_own_field() -> None:
    with pytest.raises(ContextLengthExceeded, match="max_completion_tokens is 2048") as caught:
        await chat("hi", max_completion_tokens=2048)
    assert caught.value.param == "messages"


async def test_the_models_defaults_hold_where_the_request_says_nothing() -> None:
    defaults = {"temperature": 0.7, "top_k": 20, "top_p": None, "do_sample": True, "max_new_tokens": 5, "min_p": "x"}
    serving = replace(SERVING, generation_defaults=defaults)
    prepared = await completion("a", serving=serving, top_k=0)
    assert prepared.sampling == SamplingParams(max_tokens=16, temperature=0.7, top_k=0)


async def test_sampling_errors_name_the_field() -> None:
    for fields, param in (
        ({"temperature": 2.5}, "temperature"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"logit_bias": {"512": 1}}, "logit_bias"),
        ({"stop_token_ids": [512]}, "stop_token_ids"),
        ({"top_p": 0}, "top_p"),
    ):
        with pytest.raises(BadRequest) as caught:
            await completion("a", **fields)
        assert caught.value.param == param
        assert param in str(caught.value)


async def test_more_logprobs_than_the_engine_offers_are_refused() -> None:
    with pytest.raises(BadRequest, match="At most 2 logprobs"):
        await completion("a", logprobs=3, serving=replace(SERVING, max_logprobs=2))


@pytest.mark.parametrize(
    ("prompt", "text"),
    [([1, 512], "token id 512 is outside the vocabulary of 512"), ("", "has no token"), ([[]], "has no token")],
)
async def test_prompts_that_no_engine_can_take_are_refused(prompt: object, text: str) -> None:
    with pytest.raises(BadRequest, match=text) as caught:
        await completion(prompt)
    assert caught.value.param == "prompt"


async def test_an_empty_prompt_is_its_bos_where_there_is_one() -> None:
    text = ModelText.from_files(vocabularies.byte_fallback())
    assert (await completion("", text=text)).prompts == (u32([1]),)
    with pytest.raises(BadRequest, match="has no token"):
        await completion("", text=text, add_special_tokens=False)


async def test_a_stop_string_that_is_one_special_token_is_a_stop_id_too() -> None:
    text = ModelText.from_files(vocabularies.byte_level())
    prepared = await completion("a", text=text, stop=["<end>", "x"], stop_token_ids=[7])
    assert prepared.stop == ("<end>", "x")
    assert prepared.sampling.stop_token_ids == (7, 256)


async def test_a_developer_is_the_system_where_the_template_knows_none() -> None:
    messages = [{"role": "developer", "content": "be brief"}]
    request = parse_chat({"messages": messages}, allow_unknown=False)
    assert (await TEXT.render(request)).startswith("system: be brief\n")
    knowing = ModelText.from_files(vocabularies.characters("{{ 'developer' if messages[0].role == 'developer' }}"))
    assert await knowing.render(request) == "developer"


async def test_an_echo_is_the_prompts_text_up_to_its_last_whole_character() -> None:
    text = ModelText.from_files(vocabularies.byte_level())
    ids = list(await text.tokenizer.encode("hé", add_special_tokens=False, most=4096))
    request = parse_completion({"prompt": [ids, ids[:-1]], "echo": True}, allow_unknown=False)
    assert await echoes(request, (u32(ids), u32(ids[:-1])), text) == ["hé", "h"]
    assert await echoes(replace(request, echo=False), (u32(ids), u32(ids)), text) == ["", ""]
