"""Requests over all parameters that change an answer, mixed so that each option meets many others."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.compare import Answer

Fields = Mapping[str, Any]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

#: Characters of a stop string that is cut out of an answer: several tokens in most vocabularies.
STOP_LENGTH = 3

#: For each parameter its options by name; an option is fields of the body. Every answer is long
#: enough to be disturbed, and with its prompt shorter than the context of a tiny model (640).
AXES: Mapping[str, Mapping[str, Fields]] = {
    "length": {str(n): {"max_tokens": n} for n in (40, 90, 160, 240)},
    "n": {"1": {}, "2": {"n": 2}},
    "temperature": {"greedy": {"temperature": 0}, "0.9": {"temperature": 0.9}, "1.3": {"temperature": 1.3}},
    "filter": {
        "none": {},
        "top_k": {"top_k": 20},
        "top_p": {"top_p": 0.9},
        "min_p": {"min_p": 0.05},
        "all": {"top_k": 40, "top_p": 0.95, "min_p": 0.02},
    },
    "penalty": {
        "none": {},
        "presence": {"presence_penalty": 0.8, "frequency_penalty": 0.4},
        "repetition": {"repetition_penalty": 1.2},
    },
    "end": {"ignore_eos": {"ignore_eos": True}, "eos": {}, "min_tokens": {"min_tokens": 35}},
    "logprobs": {"none": {}, "0": {"logprobs": 0}, "3": {"logprobs": 3}},
}

#: Options whose values come from an answer of the same request without them.
DERIVED = ("none", "stop string", "stop string kept", "stop id", "logit_bias", "allowed ids")

_PROMPTS: Mapping[str, Any] = {
    "short": "Tell me",
    "long": "the way of a request through the blocks of a cache and back " * 3,
    "list": ["one", "another and longer one", "the third"],
}


@dataclass(frozen=True, slots=True)
class Case:
    """One request without `cache_salt`. `options` names the option taken on every axis."""

    path: str
    body: Fields
    options: Mapping[str, str]

    @property
    def streamed(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def name(self) -> str:
        return ", ".join(f"{axis} {option}" for axis, option in self.options.items() if option != "none")

    def derived(self, answer: Answer, rng: random.Random) -> "Case":
        """With the values that depend on `answer`, the answer to this case as it is."""
        return Case(self.path, {**self.body, **_derive(self.options["derived"], answer, rng)}, self.options)


def cases(seed: int, count: int) -> list[Case]:
    """The same for the same seed. Every option of an axis comes equally often, give or take one."""
    rng = random.Random(seed)
    decks = {axis: _deck(list(options), rng) for axis, options in AXES.items()}
    routes = _deck([(CHAT, ""), (COMPLETIONS, "short"), (COMPLETIONS, "long"), (COMPLETIONS, "list")], rng)
    streaming, echoes, derived = (_deck(options, rng) for options in ((True, True, False), (True, False), DERIVED))
    made = []
    for _ in range(count):
        options = {axis: next(deck) for axis, deck in decks.items()}
        body: dict[str, Any] = {"seed": rng.randrange(2**31), "return_token_ids": True}
        for axis, option in options.items():
            body |= AXES[axis][option]
        path, prompt = next(routes)
        options |= {"route": f"completions of {prompt}" if prompt else "chat", "derived": next(derived)}
        if path == CHAT:
            body["messages"] = [{"role": "user", "content": "What is a block?"}]
            if (logprobs := body.get("logprobs")) is not None:
                body |= {"logprobs": True, "top_logprobs": logprobs}
        else:
            body["prompt"] = _PROMPTS[prompt]
            body["echo"] = next(echoes)
        options["streamed"] = "no"
        if next(streaming):
            options["streamed"] = "yes"
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        made.append(Case(path, body, options))
    return made


def _deck(options: Sequence[Any], rng: random.Random) -> Iterator[Any]:
    """Endless; each option once in every len(options)."""
    while True:
        yield from rng.sample(options, len(options))


def _derive(option: str, answer: Answer, rng: random.Random) -> Fields:
    choice = answer.choices[min(answer.choices)]
    text, ids = choice.text, choice.token_ids or ()
    match option:
        case "stop string" | "stop string kept" if len(text) > 2 * STOP_LENGTH:
            at = rng.randrange(len(text) // 2, len(text) - STOP_LENGTH)
            return {"stop": [text[at : at + STOP_LENGTH]], "include_stop_str_in_output": option.endswith("kept")}
        case "stop id" if ids:
            return {"stop_token_ids": [rng.choice(ids[len(ids) // 2 :])]}
        case "logit_bias" if ids:
            return {"logit_bias": {str(rng.choice(ids)): -100, str(rng.choice(ids)): 1.5}}
        case "allowed ids" if len(set(ids)) > 1:
            return {"allowed_token_ids": sorted(set(ids))}
        case _:
            return {}
