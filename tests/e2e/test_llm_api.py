"""`LLM` as its users call it: forms of prompts, errors before anything runs, interruption, start-up."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pyengine import LLM, ConfigError, InvalidRequestError, ModelLoadError, PyEngineError, SamplingParams
from pyengine.inputs import TextPrompt, TokensPrompt
from pyengine.sampling_params import RequestOutputKind

SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    with LLM(str(tiny_llama), device="cpu", num_kv_blocks=64, max_num_seqs=8) as made:
        yield made


def assert_idle(llm: LLM) -> None:
    stats = llm.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"]
    assert stats["num_requests"] == stats["num_running"] == stats["num_waiting"] == 0


def test_every_form_of_prompt(llm: LLM) -> None:
    ids = llm.get_tokenizer()("The boat").input_ids
    same: list[Any] = [
        "The boat",
        ["The boat"],
        {"prompt": "The boat"},
        [{"prompt": "The boat"}],
        {"prompt_token_ids": ids},
        [{"prompt_token_ids": ids}],
        ids,
        [ids],
        TextPrompt("The boat"),
        [TokensPrompt(ids)],
    ]
    outputs = [llm.generate(prompts, SHORT, use_tqdm=False) for prompts in same]
    assert {len(output) for output in outputs} == {1}
    assert len({tuple(output[0].outputs[0].token_ids) for output in outputs}) == 1
    assert llm.generate([], SHORT) == []


def test_results_come_in_order_with_params_of_their_own(llm: LLM) -> None:
    params = [SHORT.replace(max_tokens=n, output_kind=RequestOutputKind.DELTA) for n in (9, 1, 5)]
    outputs = llm.generate(["one", "two", "three"], params, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["one", "two", "three"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 5]
    assert len(llm.generate("one", use_tqdm=False)[0].outputs[0].token_ids) <= 16


def test_requests_added_to_its_engine_are_not_taken_for_its_own(llm: LLM) -> None:
    """They run in the same steps, report before all of its own have ended, and go on afterwards."""
    llm.llm_engine.add_request("other", TokensPrompt([5]), SHORT.replace(max_tokens=6))
    outputs = llm.generate(["one", "two"], [SHORT, SHORT.replace(max_tokens=2)], use_tqdm=False)
    assert [(output.prompt, len(output.outputs[0].token_ids)) for output in outputs] == [("one", 4), ("two", 2)]
    rest = []
    while llm.llm_engine.has_unfinished_requests():
        rest += llm.llm_engine.step()
    assert {(output.request_id, len(output.outputs[0].token_ids)) for output in rest[-1:]} == {("other", 6)}
    assert_idle(llm)


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "What?"}]
    (one,) = llm.chat(conversation, SHORT, use_tqdm=False)
    assert one.prompt == "<s><|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"
    assert one.prompt_token_ids.count(0) == 1  # the template writes <s>, the tokenizer adds no second one
    both = llm.chat([conversation, [*conversation, {"role": "assistant", "content": "A"}]], SHORT, use_tqdm=False)
    assert both[0].outputs[0].token_ids == one.outputs[0].token_ids
    assert both[1].prompt is not None
    assert "assistant\nA<|im_end|>" in both[1].prompt


@pytest.mark.parametrize(
    ("prompts", "params", "field"),
    [
        (["good", ""], SHORT, None),
        (["good", {"prompt_token_ids": [9999]}], SHORT, "prompt_token_ids"),
        (["good", {"text": "a"}], SHORT, "text"),
        (["good", {"prompt": "a", "prompt_token_ids": [5]}], SHORT, "prompt"),
        (["good", 5], SHORT, "prompt"),
        (5, SHORT, "prompts"),
        (["good", "b"], [SHORT], "sampling_params"),
        (["good"], {"temperature": 1}, "sampling_params"),
        (["good", "long"], [SHORT, SHORT.replace(max_tokens=2000)], "max_tokens"),
        (["good"], SHORT.replace(logit_bias={9999: 1.0}), "logit_bias"),
    ],
)
def test_one_bad_prompt_stops_all_before_any_is_run(llm: LLM, prompts: Any, params: Any, field: str | None) -> None:
    """Rule 11; and rule 13: what is too long is refused with both numbers."""
    before = llm.stats()
    if field is None:  # this tokenizer puts <s> before an empty text, which is then a prompt
        assert len(llm.generate(prompts, params, use_tqdm=False)) == 2
        return
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(prompts, params, use_tqdm=False)
    assert caught.value.field == field
    if field == "max_tokens":
        assert "2000" in str(caught.value)
        assert "1024" in str(caught.value)
    assert llm.stats() == before


def test_text_in_every_kind_of_output_agrees(llm: LLM) -> None:
    """Rules 7, 8 and 9 on sampled tokens of a byte-level vocabulary."""
    params = SamplingParams(n=3, seed=4, max_tokens=40, ignore_eos=True, logprobs=0, stop=["e", "th"], min_tokens=5)
    (output,) = llm.generate("The", params, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    assert {choice.finish_reason for choice in output.outputs} <= {"stop", "length"}
    for choice in output.outputs:
        whole = tokenizer.decode(choice.token_ids, skip_special_tokens=True)
        assert whole.startswith(choice.text)
        assert choice.logprobs is not None
        joined = b"".join(e[t].bytes or b"" for e, t in zip(choice.logprobs, choice.token_ids, strict=True))
        assert joined.decode(errors="replace") == whole
        if choice.stop_reason is not None:
            assert whole[len(choice.text) :].startswith(str(choice.stop_reason))


def test_unknown_and_wrong_arguments() -> None:
    with pytest.raises(ConfigError, match="max_sequences"):
        LLM(max_sequences=4)
    with pytest.raises(ConfigError, match="block_size"):
        LLM(block_size=12)
    with pytest.raises(ConfigError, match="block_size"):
        LLM(block_size="16")
    for model in (5, ""):
        with pytest.raises(ConfigError, match="model"):
            LLM(model)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tenants: must be a text"):
        LLM(tenants=Path("tenants.yaml"))
    with pytest.raises(ConfigError, match="device"):
        LLM(device="tpu")
    with pytest.raises(ModelLoadError, match="no such file"):
        LLM("/nowhere/at/all")


def test_a_failed_start_releases_what_it_took(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(str(tiny_llama), device="cpu", max_model_len=100_000)


def test_skip_tokenizer_init(tiny_llama: Path) -> None:
    with LLM(str(tiny_llama), device="cpu", num_kv_blocks=32, skip_tokenizer_init=True) as made:
        (output,) = made.generate([5, 6, 7], SHORT.replace(logprobs=1), use_tqdm=False)
        choice = output.outputs[0]
        assert (len(choice.token_ids), choice.text) == (4, "")
        assert choice.logprobs is not None
        assert choice.logprobs[0][choice.token_ids[0]].bytes is None
        for prompt, params in (("text", SHORT), ([5], SHORT.replace(stop="a"))):
            with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
                made.generate(prompt, params, use_tqdm=False)
        with pytest.raises(PyEngineError, match="skip_tokenizer_init"):
            made.get_tokenizer()


def test_start_up_is_logged_and_fits_itself(tiny_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rules 15 and 16: default flags start anywhere, say what they fitted, and log each phase with its time."""
    with caplog.at_level(logging.INFO, logger="pyengine"), LLM(str(tiny_llama), device="cpu") as made:
        assert made.generate("A", SHORT, use_tqdm=False)[0].finished
    for phase in ("checkpoint opened", "tokenizer loaded", "weights loaded", "KV cache allocated"):
        assert f"start-up: {phase}, " in caplog.text
    assert "KV pool: " in caplog.text


def test_a_tokenizer_from_the_hub_goes_where_downloads_go(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def download(*arguments: Any) -> Path:
        asked.append(arguments)
        return tiny_llama

    monkeypatch.setattr("pyengine.loader.tokenizer.download", download)
    folder = str(tmp_path / "downloads")
    with LLM(str(tiny_llama), device="cpu", num_kv_blocks=32, tokenizer="owner/name", download_dir=folder) as made:
        assert made.get_tokenizer()("hello").input_ids
    assert [(model, download_dir) for model, _, download_dir, _ in asked] == [("owner/name", folder)]


def test_no_chat_template_is_one_warning(tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Chats may bring a template, and so no second one says that they are refused."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    (folder / "chat_template.jinja").unlink()
    with LLM(str(folder), device="cpu", num_kv_blocks=32) as made:
        warnings = [record.getMessage() for record in caplog.records if "chat template" in record.getMessage()]
        assert warnings == [f"{folder} has no chat template: chat requests will be refused unless they bring one"]
        template = "{{ messages[0].content }}"
        (output,) = made.chat([{"role": "user", "content": "A"}], SHORT, chat_template=template, use_tqdm=False)
        assert output.prompt == "A"


def test_a_pool_smaller_than_the_model_starts_and_refuses_only_what_cannot_fit(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rules 13 and 15."""
    with (
        caplog.at_level(logging.INFO, logger="pyengine"),
        LLM(str(tiny_llama), device="cpu", num_kv_blocks=4) as made,
    ):
        assert "the KV pool holds 64 tokens, fewer than max_model_len=1024" in caplog.text
        assert made.generate([5] * 40, SHORT.replace(max_tokens=24), use_tqdm=False)[0].finished
        with pytest.raises(InvalidRequestError, match="together 65; the KV pool holds 64 tokens"):
            made.generate([5] * 40, SHORT.replace(max_tokens=25), use_tqdm=False)


@pytest.mark.parametrize("presses", [1, 2])
def test_interrupted_runs_leave_nothing_behind(llm: LLM, presses: int) -> None:
    engine = llm.llm_engine
    real, steps = engine.step, 0

    def step() -> Any:
        nonlocal steps
        steps += 1
        for _ in range(presses if steps == 3 else 0):
            os.kill(os.getpid(), signal.SIGINT)
        return real()

    assert threading.current_thread() is threading.main_thread()
    # A process that a shell starts in the background ignores SIGINT; a person at a terminal has Python's own handler.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    engine.step = step  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["one", "two"] * 8, SHORT.replace(max_tokens=50), use_tqdm=False)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        engine.step = real  # type: ignore[method-assign]
        signal.signal(signal.SIGINT, inherited)
    assert steps == 3
    assert_idle(llm)
    assert llm.generate("one", SHORT, use_tqdm=False)[0].finished


def test_another_thread_may_use_it(llm: LLM) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(llm.generate, "one", SHORT, use_tqdm=False).result()[0].finished


def test_threads_take_turns(llm: LLM) -> None:
    expected = llm.generate("one", SHORT, use_tqdm=False)[0].outputs[0].token_ids
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(llm.generate, "one", SHORT, use_tqdm=False) for _ in range(12)]
        assert all(call.result()[0].outputs[0].token_ids == expected for call in calls)


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["one", "two"], SHORT)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "output: " in shown
    llm.generate(["one"], SHORT, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, pyengine; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules); print(dir(pyengine))"
    names = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout
    for name in (
        "LLM",
        "SamplingParams",
        "RequestOutput",
        "CompletionOutput",
        "EngineArgs",
        "InvalidRequestError",
        "__version__",
    ):
        assert name in names
    import pyengine

    assert all(getattr(pyengine, name) is not None for name in pyengine.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = pyengine.nothing
