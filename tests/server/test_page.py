"""The page at /, in a real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import json
import re
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from running_server import RunningServer
from server_process import ROOT

from pyengine.config import EngineArgs
from pyengine.engine.async_engine import AsyncLLMEngine
from pyengine.engine.llm_engine import LLMEngine
from pyengine.server.auth import ApiKeys

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")
TEXT = "Once upon a time"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make dev")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-background-networking", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page whose console stays silent and which asks only its own server."""
    page = browser.new_page(viewport={"width": 900, "height": 820})
    page.set_default_timeout(60_000)
    complaints: list[str] = []
    hosts: set[str] = set()
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]) if request.url.startswith("http") else None)
    yield page
    page.close()
    # A test's server may go before its page does, which then asks in vain.
    real = [text for text in complaints if "net::ERR_CONNECTION" not in text]
    assert real == getattr(page, "expected_complaints", [])
    assert len(hosts) == 1


def wait_text(page: Any, selector: str, text: str | re.Pattern[str], *, timeout: int = 60_000) -> None:
    """Until an element's text is `text`, or matches it. The page's policy forbids to evaluate JavaScript from here."""
    from playwright.sync_api import expect

    expect(page.locator(selector)).to_have_text(text, timeout=timeout)


def click_until(page: Any, button: str, selector: str, text: str) -> None:
    """Clicks as a user would, again if a busy browser lost the first click."""
    for _ in range(5):
        if page.is_enabled(button):
            page.click(button)
        with suppress(AssertionError):
            wait_text(page, selector, text, timeout=10_000)
            return
    wait_text(page, selector, text)


def fill(page: Any, prompt: str, max_tokens: int) -> None:
    page.fill("#prompt", prompt)
    page.fill("#max-tokens", str(max_tokens))
    page.click("#go")


def test_the_page_comes_with_a_strict_policy_and_from_this_server(shared_http_server: RunningServer) -> None:
    for path, kind in (("/", "text/html"), ("/static/page.js", "text/javascript"), ("/static/page.css", "text/css")):
        with urllib.request.urlopen(shared_http_server.base_url + path, timeout=60) as answer:
            body = answer.read().decode()
            assert answer.headers["content-type"].startswith(kind)
            policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http:" not in body
        assert "https:" not in body


@needs_chromium
def test_typing_a_prompt_streams_its_answer(page: Any, smollm2_path: Path) -> None:
    args = EngineArgs(model=str(smollm2_path), device="cpu", num_kv_blocks=64, max_model_len=512, served_model_name="smollm2")
    server = RunningServer(AsyncLLMEngine(LLMEngine(args)), http_port=0)
    try:
        page.goto(server.base_url)
        wait_text(page, "#model", "smollm2")
        page.select_option("#kind", "completion")
        fill(page, TEXT, 256)
        wait_text(page, "#answer", re.compile(r"\S"))
        partial = page.text_content("#answer")
        wait_text(page, "#running", "1")  # the gauges live
        wait_text(page, "#reason", "length")
        text = page.text_content("#answer")
        assert text.startswith(partial)
        assert len(text) > len(partial), "it came in pieces"
        params = {"prompt": TEXT, "max_tokens": 256, "temperature": 0}
        assert text == _completion(server, params)
        assert page.text_content("#tokens") == "256"
        assert page.text_content("#reason") == "length"
        assert float(page.text_content("#ttft").removesuffix(" ms")) > 0
        assert float(page.text_content("#rate")) > 0
        wait_text(page, "#running", "0")
        shown = page.screenshot(full_page=True)
        assert shown.startswith(b"\x89PNG")
        kept = ROOT / "docs/page.png"
        if not kept.exists():  # kept with the docs; remove it to have it taken anew
            kept.write_bytes(shown)
    finally:
        server.close()


def _completion(server: RunningServer, params: dict[str, Any]) -> str:
    request = urllib.request.Request(
        f"{server.base_url}/v1/completions", json.dumps(params).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["text"])


@needs_chromium
def test_stop_cancels_and_errors_are_shown(page: Any) -> None:
    engine = FakeEngine()
    server = RunningServer(engine, http_port=0)
    try:
        page.goto(server.base_url)
        engine.hold = 3
        fill(page, "a", 20)
        wait_text(page, "#answer", "t10 t11 t12 ")
        click_until(page, "#stop", "#reason", "you")
        page.wait_for_selector("#go:enabled")
        engine.hold = None
        page.expected_complaints = ["Failed to load resource: the server responded with a status of 400 (Bad Request)"]
        fill(page, "a", 5000)
        wait_text(page, "#error", re.compile("max_model_len"))
        assert engine.num_aborted == 1
    finally:
        server.close()


@needs_chromium
def test_markup_in_an_answer_is_text(page: Any) -> None:
    server = RunningServer(FakeEngine(), http_port=0)
    try:
        page.goto(server.base_url)
        page.route("**/v1/chat/completions", lambda route: route.fulfill(body=_EVIL, content_type="text/event-stream"))
        fill(page, "a", 5)
        wait_text(page, "#reason", "stop")
        assert page.text_content("#answer") == "<img src=x onerror=alert(1)>"
        assert page.query_selector("#answer img") is None
    finally:
        server.close()


_EVIL = (
    'data: {"choices": [{"index": 0, "delta": {"content": "<img src=x onerror=alert(1)>"}, "finish_reason": "stop"}]}\n\n'
    "data: [DONE]\n\n"
)


@needs_chromium
def test_the_page_is_open_and_asks_for_the_key(page: Any) -> None:
    server = RunningServer(FakeEngine(), ApiKeys(["secret"]), http_port=0)
    try:
        page.expected_complaints = ["Failed to load resource: the server responded with a status of 401 (Unauthorized)"] * 2
        page.goto(server.base_url)
        wait_text(page, "#model", "needs an API key")
        fill(page, "a", 3)
        wait_text(page, "#error", re.compile("API key"))
        page.fill("#key", "secret")
        fill(page, "a", 3)
        wait_text(page, "#answer", "t10 t11 t12 ")
        assert page.text_content("#model") == "fake"
    finally:
        server.close()
