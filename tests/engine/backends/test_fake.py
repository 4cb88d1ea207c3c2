"""FakeRunner: tokens that are a pure function of the prefix, and a judge that no bad plan passes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer

from engine.backends import BUILT_IN, BackendError, create, fake_tokenizer
from engine.backends.fake import FakeRunner, PlanError
from engine.backends.fake_tokenizer import END_OF_TEXT, TURN_END, VOCAB_SIZE
from engine.plan import PlanEntry, SlotState, StepPlan
from protocol.messages import u32
from protocol.sampling import SamplingParams
from tests.engine.control import alone, fake_config, submit

PROMPT = list(b"sixteen letters.and more")
GREEDY = SamplingParams(temperature=0.0)


def loaded(**values: object) -> FakeRunner:
    runner = FakeRunner(fake_config(**values))
    runner.load(lambda phase, done, total: None)
    return runner


def state(slot: int = 0, prompt: list[int] = PROMPT, generated: list[int] | None = None) -> SlotState:
    return SlotState(slot, u32(prompt), u32(generated or []), GREEDY, seed=0)


def entry(
    start: int,
    ids: list[int],
    *,
    count: int | None = None,
    slot: int = 0,
    blocks: tuple[int, ...] = (),
    sample: bool = False,
) -> PlanEntry:
    return PlanEntry(slot, start, len(ids) if count is None else count, u32(ids), blocks, sample)


def run(runner: FakeRunner, step: int, entries: list[PlanEntry], entered: list[SlotState] | None = None) -> list[int]:
    runner.launch(StepPlan(step, tuple(entered or ()), tuple(entries)))
    return list(runner.collect().ids)


def test_chunks_hits_and_one_id_short_entries_give_the_tokens_of_a_lone_run():
    expected = list(alone(submit(1, bytes(PROMPT), max_tokens=3, temperature=0.0)))
    runner = loaded(fake_depth=2)
    assert run(runner, 1, [entry(0, PROMPT[:7], blocks=(4, 2))], [state()]) == []
    assert run(runner, 2, [entry(7, PROMPT[7:], sample=True)]) == expected[:1]
    runner.launch(StepPlan(3, (), (entry(24, expected[:1], sample=True),)))
    runner.launch(StepPlan(4, (), (entry(25, [], count=1, sample=True),)))
    assert list(runner.collect().ids) == expected[1:2]
    assert list(runner.collect().ids) == expected[2:3]
    # Block 4 is full, so another slot may read it.
    assert run(runner, 5, [entry(16, PROMPT[16:], slot=1, blocks=(4, 5), sample=True)], [state(1)]) == expected[:1]


Break = Callable[[FakeRunner], object]


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (lambda r: run(r, 2, [entry(9, PROMPT[9:], sample=True)]), "slot 0 has 8 positions, not 9"),
        (lambda r: run(r, 2, [entry(8, PROMPT[8:], slot=1, sample=True)]), "nothing has entered slot 1"),
        (lambda r: run(r, 2, [entry(8, [1] * 16, sample=True)]), "slot 0 has other ids at 8"),
        (lambda r: run(r, 2, [entry(8, PROMPT[8:], sample=False)]), "slot 0 knows 24 tokens, the entry ends at 24"),
        (lambda r: run(r, 2, [entry(8, PROMPT[8:20], sample=True)]), "slot 0 knows 24 tokens, the entry ends at 20"),
        (
            lambda r: run(r, 2, [entry(8, [*PROMPT[8:], 65], sample=True)]),
            "slot 0 knows 24 tokens, the entry ends at 25",
        ),
        (lambda r: run(r, 2, [entry(8, [])]), "cannot hold positions to 8"),
        (lambda r: run(r, 2, [entry(8, PROMPT[8:], blocks=(3, 3), sample=True)]), "in blocks [3, 7, 3, 3]"),
        (lambda r: run(r, 2, [entry(8, PROMPT[8:10]), entry(10, PROMPT[10:12])]), "a slot is planned twice"),
        (
            lambda r: run(r, 2, [entry(0, PROMPT[:24], slot=1, blocks=(5,), sample=True)], [state(1)]),
            "slot 1 cannot hold positions to 24 in blocks [5]",
        ),
        (  # a block that another request is writing
            lambda r: (
                run(r, 2, [entry(0, list(b"other"), slot=1, blocks=(3,), sample=True)], [state(1, list(b"other"))]),
                run(r, 3, [entry(8, PROMPT[8:], sample=True)]),
            ),
            "step 3: a block of slot 0 holds another prefix",
        ),
        (  # the same, as far as the first had come
            lambda r: (
                run(
                    r, 2, [entry(0, list(b"8 others"), slot=1, blocks=(3,), sample=True)], [state(1, list(b"8 others"))]
                ),
                run(r, 3, [entry(8, PROMPT[8:], sample=True)]),
            ),
            "a block of slot 0 holds another prefix",
        ),
        (  # a hit on a block of another prefix
            lambda r: run(r, 2, [entry(16, [65], slot=1, blocks=(3, 4), sample=True)], [state(1, [9] * 16 + [65])]),
            "a block of slot 1 holds another prefix",
        ),
        (
            lambda r: [
                r.launch(StepPlan(step, (), (entry(8 + step, PROMPT[8 + step : 9 + step]),))) for step in range(3)
            ],
            "1 steps are in flight already",
        ),
    ],
)
def test_plans_that_no_device_could_run_are_refused(broken: Break, text: str):
    runner = loaded()
    run(runner, 1, [entry(0, PROMPT[:8], blocks=(3, 7))], [state()])
    with pytest.raises(PlanError) as raised:
        broken(runner)
    assert text in str(raised.value)


def ids(**values: object) -> list[int]:
    return list(alone(submit(1, **({"max_tokens": 200} | values))))


def test_the_seed_counts_unless_greedy():
    assert ids(temperature=0.0, seed=1) == ids(temperature=0.0, seed=2)
    assert ids(temperature=1.0, seed=1) != ids(temperature=1.0, seed=2)
    assert ids(temperature=1.0, seed=1) == ids(temperature=1.0, seed=1)
    assert ids(temperature=0.0) != ids(temperature=0.0, prompt=b"another")


def test_it_says_words():
    text = bytes(ids())
    assert len(text) == 200
    assert set(text) <= set(b"abcdefghijklmnopqrstuvwxyz ")
    assert text.count(b" ") > 10


def test_restrictions_are_heeded():
    assert set(ids(allowed_token_ids=(240, 159))) == {240, 159}
    assert set(ids(logit_bias=((200, 100.0),))) == {200}
    assert ord("e") not in ids(logit_bias=((ord("e"), -100.0),))
    assert ord("e") in ids()


def test_end_of_sequence_comes_on_average_after_the_length_asked_for_and_never_before_min_tokens():
    lengths = [len(alone(submit(1, temperature=1.0, seed=seed, max_tokens=400), mean_length=20)) for seed in range(60)]
    assert 12 < sum(lengths) / len(lengths) < 30
    held = [alone(submit(1, seed=seed, max_tokens=50, min_tokens=40), mean_length=5) for seed in range(5)]
    assert all(len(tokens) > 40 for tokens in held)
    assert all(TURN_END not in tokens[:40] for tokens in held)


def test_logprobs_are_well_formed():
    runner = loaded()
    two = SlotState(0, u32([65]), u32(), SamplingParams(logprobs=2), seed=0)
    none = SlotState(1, u32([66]), u32(), SamplingParams(logprobs=0), seed=0)
    runner.launch(
        StepPlan(
            1, (two, none), (entry(0, [65], blocks=(0,), sample=True), entry(0, [66], slot=1, blocks=(1,), sample=True))
        )
    )
    result = runner.collect()
    logprobs = result.logprobs
    assert logprobs is not None
    assert (logprobs.k, len(logprobs.own), len(logprobs.top_ids), len(logprobs.top)) == (2, 2, 4, 4)
    assert logprobs.top_ids[0::2] == result.ids


def test_a_step_takes_its_time_also_with_two_in_flight():
    runner = loaded(fake_depth=2, fake_step_ms=20.0, fake_token_us=1000.0)
    started = time.monotonic()
    runner.launch(StepPlan(1, (state(),), (entry(0, PROMPT, blocks=(0, 1), sample=True),)))
    runner.launch(StepPlan(2, (), (entry(24, [], count=1, sample=True),)))
    assert time.monotonic() - started < 0.02
    runner.collect()
    assert 0.044 <= time.monotonic() - started < 0.1
    runner.collect()
    assert 0.065 <= time.monotonic() - started < 0.15


def test_what_it_says_of_itself():
    info = FakeRunner(fake_config(max_model_len=300)).load(lambda phase, done, total: None)
    assert (info.vocab_size, info.context_length, info.block_size, info.num_blocks) == (VOCAB_SIZE, 300, 16, 64)
    assert info.eos_ids == (TURN_END, END_OF_TEXT)
    other = FakeRunner(fake_config(fake_mean_length=7)).load(lambda phase, done, total: None)
    assert other.digest != info.digest


def test_progress_runs_to_the_end():
    seen: list[tuple[str, int, int]] = []
    FakeRunner(fake_config()).load(lambda phase, done, total: seen.append((phase, done, total)))
    assert seen[0] == ("weights", 0, 20)
    assert seen[-1] == ("weights", 20, 20)


def test_byte_characters_are_those_of_byte_level_vocabularies():
    characters = fake_tokenizer.byte_characters()
    assert len(set(characters)) == 256
    assert (characters[ord("a")], characters[ord(" ")], characters[ord("\n")], characters[0]) == ("a", "Ġ", "Ċ", "Ā")


def test_special_tokens_and_the_long_word_keep_their_numbers():
    tokenizer = Tokenizer.from_str(json.dumps(fake_tokenizer.tokenizer()))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    for token, text in fake_tokenizer.SPECIAL_TOKENS.items():
        assert tokenizer.encode(text).ids == [token]
    assert tokenizer.decode([fake_tokenizer.LONG_WORD]) == fake_tokenizer.LONG_WORD_TEXT == " implementation"
    assert tokenizer.encode(" implementation").ids == list(b" implementation")


def test_backends_are_found_by_name():
    assert isinstance(create(fake_config()), FakeRunner)
    with pytest.raises(BackendError, match="--backend must be one of auto, fake, torch_runner, transformers"):
        create(fake_config(backend="cuda"))
    assert sorted(BUILT_IN) == ["fake", "torch_runner", "transformers"]


def test_engines_of_other_bits_have_the_same_digest():
    runners = [FakeRunner(fake_config(fake_numerics=name)) for name in ("", "", "other")]
    infos = [runner.load(lambda phase, done, total: None) for runner in runners]
    assert len({info.digest for info in infos}) == 1
    assert infos[0].numerics == infos[1].numerics != infos[2].numerics
