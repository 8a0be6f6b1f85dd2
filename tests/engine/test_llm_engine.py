"""The step loop on a scripted executor: outputs of each kind, stop strings, logprobs, n choices, errors."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import sample_tokenizers
from fake_executor import counting, fake_engine, script_of

from pyengine.engine.llm_engine import LLMEngine
from pyengine.errors import EngineDeadError, InvalidRequestError
from pyengine.inputs import TextPrompt, TokensPrompt
from pyengine.outputs import RequestOutput
from pyengine.sampling_params import RequestOutputKind, SamplingParams
from pyengine.scheduler_output import NewRequestData

TOKENIZER = sample_tokenizers.byte_level()
EOS = TOKENIZER.eos_token_id


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False).input_ids)


def text_engine(*texts: str, **args: Any) -> LLMEngine:
    """An engine whose sequence i says texts[i], then ends."""
    tokens = [[*ids_of(text), EOS] for text in texts]
    return fake_engine(script_of(*tokens), TOKENIZER, vocab_size=len(TOKENIZER), eos_token_ids=(EOS,), **args)[0]


def drive(engine: LLMEngine) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    stats = engine.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"]
    assert stats["num_requests"] == 0
    return outputs


def run(engine: LLMEngine, kind: RequestOutputKind, **params: Any) -> list[RequestOutput]:
    values = {"max_tokens": 100, "temperature": 1.0, "seed": 1} | params
    engine.add_request("r", TextPrompt("the prompt"), SamplingParams(output_kind=kind, **values))
    return drive(engine)


def test_output_kinds_agree() -> None:
    text = "the cat 😀 and 日本語"
    deltas = run(text_engine(text), RequestOutputKind.DELTA)
    cumulative = run(text_engine(text), RequestOutputKind.CUMULATIVE)
    (final,) = run(text_engine(text), RequestOutputKind.FINAL_ONLY)
    assert final.finished
    choice = final.outputs[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (text, "stop", None)
    assert choice.token_ids == [*ids_of(text), EOS]
    assert "".join(o.outputs[0].text for o in deltas) == text
    assert [i for o in deltas for i in o.outputs[0].token_ids] == choice.token_ids
    assert cumulative[-1].outputs[0].text == text
    texts = [o.outputs[0].text for o in cumulative]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    for outputs in (deltas, cumulative):
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert all(o.outputs[0].text for o in deltas[:-1])  # rule 8: no empty chunks
    assert final.prompt == "the prompt"
    assert final.prompt_token_ids == ids_of("the prompt")


def test_stop_strings_streamed_and_whole_agree() -> None:
    """Rule 8: across tokens, inside a token, overlapping; nothing of a stop string leaks and no chunk is empty."""
    rng = random.Random(5)
    stopped = 0
    for _ in range(150):
        text = "".join(rng.choices(["the", "ab", "a", "b", " th", "e", "😀", "ba"], k=rng.randrange(3, 25)))
        stops = [
            "".join(rng.choices(["a", "b", "th", "he", "😀", "e"], k=rng.randrange(1, 4))) for _ in range(rng.randrange(1, 4))
        ]
        include = rng.random() < 0.5
        params = {"stop": stops, "include_stop_str_in_output": include}
        (final,) = run(text_engine(text), RequestOutputKind.FINAL_ONLY, **params)
        deltas = run(text_engine(text), RequestOutputKind.DELTA, **params)
        choice = final.outputs[0]
        ends = [(text.index(s) + len(s), -len(s), s) for s in stops if s in text]
        if ends:
            end, _, stop = min(ends)
            stopped += 1
            assert choice.text == text[: end if include else end - len(stop)]
            assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
            consumed = TOKENIZER.decode(choice.token_ids)
            assert len(consumed) >= end
            assert len(TOKENIZER.decode(choice.token_ids[:-1])) < end or "\ufffd" in TOKENIZER.decode(choice.token_ids[:-1])
        else:
            assert (choice.text, choice.stop_reason) == (text, None)
        assert "".join(o.outputs[0].text for o in deltas) == choice.text
        assert [i for o in deltas for i in o.outputs[0].token_ids] == choice.token_ids
        assert all(o.outputs[0].text for o in deltas[:-1])
        assert (deltas[-1].outputs[0].finish_reason, deltas[-1].outputs[0].stop_reason) == ("stop", choice.stop_reason)
    assert 50 < stopped < 150


def test_text_is_held_back_no_longer_than_needed() -> None:
    """Rule 8: only what may become a stop string waits."""
    outputs = run(text_engine("abcabd!"), RequestOutputKind.DELTA, stop=["abd?"])
    assert [o.outputs[0].text for o in outputs if o.outputs[0].text] == ["abc", "abd!"]
    outputs = run(text_engine("abcab"), RequestOutputKind.DELTA, stop=["abd"])
    assert [o.outputs[0].text for o in outputs] == ["abc", "ab"]
    outputs = run(text_engine("xyz"), RequestOutputKind.DELTA, stop=["abd"])
    assert [o.outputs[0].text for o in outputs] == ["x", "y", "z", ""]


def test_min_tokens_delays_stop_strings() -> None:
    (output,) = run(text_engine("abababab"), RequestOutputKind.FINAL_ONLY, stop=["ab"], min_tokens=3)
    assert output.outputs[0].text == "ab"  # the first match is not counted, the one that ends with token 4 is
    assert output.outputs[0].token_ids == ids_of("abab")


def test_stop_token_is_no_text() -> None:
    (b,) = ids_of("b")
    (output,) = run(text_engine("aabaa"), RequestOutputKind.FINAL_ONLY, stop_token_ids=[b])
    choice = output.outputs[0]
    assert (choice.text, choice.token_ids, choice.stop_reason) == ("aa", ids_of("aab"), b)
    (output,) = run(text_engine("aabaa"), RequestOutputKind.FINAL_ONLY, stop_token_ids=[b], include_stop_str_in_output=True)
    assert output.outputs[0].text == "aab"


def test_length_limit_and_a_cut_off_character() -> None:
    (output,) = run(text_engine("a日本"), RequestOutputKind.FINAL_ONLY, max_tokens=3)
    choice = output.outputs[0]
    assert (choice.text, choice.finish_reason, len(choice.token_ids)) == ("a\ufffd", "length", 3)
    deltas = run(text_engine("a日本"), RequestOutputKind.DELTA, max_tokens=3)
    assert [o.outputs[0].text for o in deltas] == ["a", "\ufffd"]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_logprobs_carry_the_texts_bytes(kind: RequestOutputKind) -> None:
    """Rule 9: bytes joined equal the text; one entry a token; cumulative_logprob is their sum."""
    outputs = run(text_engine("日本 the 😀"), kind, logprobs=1, prompt_logprobs=1)
    last = outputs[-1].outputs[0]
    if kind is RequestOutputKind.DELTA:
        entries = [entry for o in outputs for entry in o.outputs[0].logprobs or []]
        token_ids = [token_id for o in outputs for token_id in o.outputs[0].token_ids]
        prompt_logprobs = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
        assert len(prompt_logprobs) == 1
    else:
        entries, token_ids = last.logprobs or [], last.token_ids
        prompt_logprobs = [outputs[-1].prompt_logprobs]
    assert len(entries) == len(token_ids)
    assert (
        b"".join(entry[token_id].bytes or b"" for entry, token_id in zip(entries, token_ids, strict=True)).decode()
        == "日本 the 😀"
    )
    assert all(entry[token_id].rank == 1 and len(entry) == 2 for entry, token_id in zip(entries, token_ids, strict=True))
    assert last.cumulative_logprob == pytest.approx(-0.5 * len(token_ids))
    prompt = ids_of("the prompt")
    assert prompt_logprobs[0] is not None
    assert prompt_logprobs[0][0] is None
    assert [next(iter(entry)) for entry in prompt_logprobs[0][1:] if entry is not None] == prompt[1:]


def test_no_logprobs_unless_asked_for() -> None:
    (output,) = run(text_engine("ab"), RequestOutputKind.FINAL_ONLY)
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None
    assert output.prompt_logprobs is None


def test_n_choices_are_one_stream() -> None:
    texts = ["a", "abcd", "the"]
    for kind in RequestOutputKind:
        engine = text_engine(*texts)
        outputs = run(engine, kind, n=3)
        assert {o.request_id for o in outputs} == {"r"}
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        got = ["", "", ""]
        for output in outputs:
            for choice in output.outputs:
                got[choice.index] = got[choice.index] + choice.text if kind is RequestOutputKind.DELTA else choice.text
        assert got == texts
    assert [len(o.outputs) for o in outputs] == [3]


def test_choices_have_consecutive_seeds_and_unseeded_requests_differ() -> None:
    """Rule 10: choice i of n draws with seed + i; without a seed no two requests draw alike."""
    engine, executor = fake_engine(counting)
    for name, seed in (("a", 7), ("b", 2**63 - 1), ("c", None), ("d", None)):
        engine.add_request(name, TokensPrompt([5, 6]), SamplingParams(n=2, seed=seed, max_tokens=2))
    drive(engine)
    seeds = {data.req_id: data.seed for step in executor.steps for data in step.scheduled_new_reqs}
    assert (seeds["0_a"], seeds["1_a"]) == (7, 8)
    assert (seeds["0_b"], seeds["1_b"]) == (2**63 - 1, -(2**63))
    assert seeds["1_c"] - seeds["0_c"] in (1, 1 - 2**64)
    assert seeds["0_c"] != seeds["0_d"]


def test_ids_of_live_requests_are_taken() -> None:
    engine, _ = fake_engine(counting)
    params = SamplingParams(max_tokens=3)
    engine.add_request("r", TokensPrompt([5]), params)
    with pytest.raises(InvalidRequestError, match="'r' is in use"):
        engine.add_request("r", TokensPrompt([5]), params)
    engine.add_request("1_x", TokensPrompt([5]), params)
    with pytest.raises(InvalidRequestError, match="request_id"):
        engine.add_request("x", TokensPrompt([5]), SamplingParams(n=2, max_tokens=3))
    assert len(drive(engine)) > 0
    engine.add_request("r", TokensPrompt([5]), params)
    drive(engine)


def test_abort_at_any_point_frees_everything() -> None:
    """Rule 5: queued, prefilling or decoding; the others go on as if nothing was."""
    engine, executor = fake_engine(counting, max_num_seqs=2, max_num_batched_tokens=16, num_kv_blocks=32)
    for step_of_abort in range(8):
        params = SamplingParams(max_tokens=6, output_kind=RequestOutputKind.FINAL_ONLY)
        engine.add_request("stay", TokensPrompt([3] * 5), params)
        engine.add_request("long", TokensPrompt([4] * 40), params)
        engine.add_request("queued", TokensPrompt([5] * 5), params)
        outputs = []
        for _ in range(step_of_abort):
            outputs += engine.step()
        aborted = engine.abort_request(["long", "queued", "unknown"])
        assert {o.request_id for o in aborted} <= {"long", "queued"}
        assert all(o.finished and o.outputs[0].finish_reason == "abort" for o in aborted)
        outputs += drive(engine)
        (stay,) = [o for o in outputs if o.request_id == "stay"]
        assert stay.outputs[0].token_ids == [103, 104, 105, 106, 107, 108]
    assert executor.steps
    assert engine.stats()["request_success"]["abort"] > 8


def test_a_failed_request_fails_alone() -> None:
    engine, executor = fake_engine(counting)
    for name in ("good", "bad"):
        engine.add_request(name, TokensPrompt([3]), SamplingParams(max_tokens=5, n=2, output_kind=RequestOutputKind.FINAL_ONLY))
    engine.step()
    executor.fail_requests["1_bad"] = "NaN logits"
    outputs = {o.request_id: o for o in drive(engine)}
    assert outputs["bad"].error == "NaN logits"
    assert [c.finish_reason for c in outputs["bad"].outputs] == ["error", "error"]
    assert outputs["good"].error is None
    assert [c.finish_reason for c in outputs["good"].outputs] == ["length", "length"]


def test_a_failed_step_ends_the_engine_and_leaves_nothing_behind() -> None:
    engine, executor = fake_engine(counting)
    for name in ("a", "b"):
        engine.add_request(name, TokensPrompt([3] * 20), SamplingParams(max_tokens=5, n=2))
    engine.step()
    executor.fail_at = 0
    with pytest.raises(EngineDeadError, match="scripted failure"):
        engine.step()
    assert engine.errored
    stats = engine.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"]
    assert not engine.has_unfinished_requests()
    with pytest.raises(EngineDeadError, match="scripted failure"):
        engine.add_request("c", TokensPrompt([3]), SamplingParams())
    with pytest.raises(EngineDeadError):
        engine.step()
    engine.shutdown()
    assert executor.is_shut_down


def test_metrics_of_a_request() -> None:
    engine, _ = fake_engine(counting)
    engine.add_request("r", TokensPrompt([3] * 5), SamplingParams(max_tokens=4, output_kind=RequestOutputKind.FINAL_ONLY))
    (output,) = drive(engine)
    times = output.metrics
    assert times is not None
    order = [times.arrival_time, times.first_scheduled_time, times.first_token_time, times.last_token_time, times.finished_time]
    assert order == sorted(order, key=lambda t: t or 0.0)
    assert None not in order
    metrics = engine.metrics
    assert (metrics.prompt_tokens, metrics.generation_tokens) == (5, 4)
    assert metrics.request_success == {"stop": 0, "length": 1, "abort": 0, "error": 0}
    assert metrics.time_to_first_token_seconds.count == metrics.e2e_request_latency_seconds.count == 1
    assert metrics.inter_token_latency_seconds.count == 3
    assert metrics.iteration_tokens_total.sum == 5 + 3


def test_cached_tokens_are_reported() -> None:
    engine, _ = fake_engine(counting)
    for name, cached in (("cold", 0), ("warm", 32)):
        engine.add_request(name, TokensPrompt([3] * 40), SamplingParams(max_tokens=2, output_kind=RequestOutputKind.FINAL_ONLY))
        (output,) = drive(engine)
        assert output.num_cached_tokens == cached
    assert engine.stats()["num_cached_tokens"] == 32


def test_bad_words_and_stop_ids_reach_the_worker() -> None:
    engine = text_engine("abc")
    executor: Any = engine._executor
    run(engine, RequestOutputKind.FINAL_ONLY, bad_words=["he"], stop_token_ids=[9])
    data: NewRequestData = executor.steps[0].scheduled_new_reqs[0]
    assert data.bad_words_token_ids == [ids_of("he"), ids_of(" he")]
    assert data.stop_token_ids == {EOS, 9}
    run(engine, RequestOutputKind.FINAL_ONLY, ignore_eos=True, max_tokens=5)
    assert [s.scheduled_new_reqs[0].stop_token_ids for s in executor.steps if s.scheduled_new_reqs][-1] == frozenset()
