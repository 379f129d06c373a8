# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser and a real server: a chat of three turns, stop, regenerate, a wrong key, a dead engine,
and the live state. What the chat draws and keeps: test_chat_page.py.

With BLINK_SCREENSHOTS set to a folder, pictures of the page are kept there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from blink.models.weights.files import default_model_path
from browser import Browser, Page, run_browser
from ports import free_port
from processes import children_of, stop, under_load, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]
KEY = "a-key"
_SECONDS = 60_000  # milliseconds that anything may take


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    pid: int


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A whole server with the default model and a key, under its supervisor."""
    if not default_model_path().is_file():
        pytest.skip("the default model is not downloaded")
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "blink", "serve", f"--port={port}", f"--api-key={KEY}", "--device=cpu"]
    process = subprocess.Popen([*command, "--max-model-len=2048", "--cpu-threads=1"])
    try:
        wait_for(lambda: process.poll() is not None or _is_ready(address), 300)
        yield Server(address, process.pid)
    finally:
        stop(process)


def _is_ready(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def url(server: Server) -> str:
    return server.url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with run_browser() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    """The page with the right key given; no error may appear in its console."""
    context = browser.new_context(viewport={"width": 1000, "height": 720}, color_scheme="light")
    page = context.new_page()
    page.set_default_timeout(_SECONDS)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: request.url.startswith(url) or faults.append(f"asked {request.url}"))
    page.goto(url)
    give_key(page, KEY)
    yield page
    context.close()
    assert faults == []


def give_key(page: Page, key: str) -> None:
    page.get_by_label("Key", exact=True).fill(key)
    page.get_by_role("button", name="Use").click()
    if key == KEY:
        page.locator("#model", has_text="SmolLM2").wait_for()


def say(page: Page, text: str, *, wait: bool = True) -> None:
    """Send a message by keyboard alone."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    if wait:
        page.locator("li.user", has_text=text).last.wait_for()
        wait_idle(page)


def wait_idle(page: Page) -> None:
    """Wait until no answer is being streamed."""
    page.get_by_role("button", name="Send").wait_for()


def answers(page: Page) -> list[str]:
    return page.locator("li.assistant > .body").all_inner_texts()


def be_greedy(page: Page, max_tokens: int) -> None:
    page.get_by_text("Parameters").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Most tokens").fill(str(max_tokens))
    page.get_by_text("Parameters").click()


def picture(page: Page, name: str) -> None:
    if folder := os.environ.get("BLINK_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def test_each_turn_of_a_chat_sends_all_turns_before_it(page: Page) -> None:
    sent: list[list[dict[str, str]]] = []
    page.on("request", lambda r: sent.append(r.post_data_json["messages"]) if r.method == "POST" else None)
    be_greedy(page, 60)
    questions = ["What is the capital of France?", "And of Italy?", "Which one is larger?"]
    for question in questions:
        say(page, question)
    assert "Paris" in answers(page)[0]
    turns = [
        message
        for question, answer in zip(questions, answers(page), strict=True)
        for message in ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    ]
    assert [*map(len, sent)] == [1, 3, 5] and sent[2] == turns[:-1]
    notes = page.locator("li.assistant small").all_inner_texts()
    assert len(notes) == 3 and all("first token after" in note and "tokens," in note for note in notes)
    picture(page, "page-chat")


def test_a_greedy_answer_that_is_regenerated_is_the_same(page: Page) -> None:
    be_greedy(page, 20)
    say(page, "Count to ten.")
    before = answers(page)
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_text("2/2").wait_for()
    wait_idle(page)
    assert answers(page) == before and len(before) == 1


@pytest.mark.parametrize("how", ["button", "key"])
def test_stop_in_mid_stream_ends_the_request_at_the_engine(page: Page, url: str, how: str) -> None:
    be_greedy(page, 1500)
    say(page, "Write a very long story about the sea.", wait=False)
    wait_for(lambda: any(len(answer) > 20 for answer in answers(page)), 60)
    assert metric(url, "vllm:num_requests_running") == 1
    page.get_by_role("button", name="Stop").click() if how == "button" else page.keyboard.press("Escape")
    wait_idle(page)
    assert "stopped" in page.locator("li.assistant small").inner_text()
    length = len(answers(page)[0])
    wait_for(lambda: metric(url, "vllm:num_requests_running") == 0, 30)
    assert len(answers(page)[0]) == length > 20


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_a_wrong_key_is_asked_for_again(page: Page) -> None:
    page.get_by_role("button", name="API key").click()
    give_key(page, "wrong")
    page.get_by_text("does not accept this key").wait_for()
    give_key(page, KEY)
    be_greedy(page, 5)
    say(page, "Hello!")
    assert answers(page)[0]


def test_markup_in_an_answer_stays_text(page: Page) -> None:
    say(page, "<img src=x onerror=alert(1)>", wait=False)
    item = page.locator("li.user > .body")
    assert item.inner_text() == "<img src=x onerror=alert(1)>" and page.locator("#messages img").count() == 0
    page.get_by_role("button", name="Stop").click()


def test_the_state_moves_with_the_load(page: Page, url: str) -> None:
    page.get_by_role("link", name="State").click()
    with under_load(url, KEY, prompt=[1, 2, 3], max_tokens=50, ignore_eos=True):
        page.locator("figure", has_text="Sequences").get_by_text("2 running").wait_for()
        page.locator("#classes tr", has_text="best-effort").locator("td", has_text="1").wait_for()
        line = page.locator("polyline").first
        wait_for(lambda: len((line.get_attribute("points") or "").split()) > 6, 60)
        assert "out," in page.locator("figure output").first.inner_text()
        assert page.locator("#frontends tbody tr").count() == 1
        picture(page, "page-state")
        page.emulate_media(color_scheme="dark")
        picture(page, "page-state-dark")


def test_on_a_phone_nothing_is_wider_than_the_screen(browser: Browser, url: str) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 640}, color_scheme="dark", is_mobile=True)
    page = context.new_page()
    page.set_default_timeout(_SECONDS)
    page.goto(url)
    give_key(page, KEY)
    be_greedy(page, 30)
    say(page, "What is the capital of France?")
    for view in ("chat", "state"):
        page.goto(f"{url}/#{view}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        picture(page, f"page-phone-{view}")
    context.close()


def test_an_engine_that_dies_is_shown_and_its_return_too(page: Page, server: Server) -> None:
    be_greedy(page, 1500)
    say(page, "Write a very long story about the sea.", wait=False)
    wait_for(lambda: any(len(answer) > 20 for answer in answers(page)), 60)
    os.kill(find_engine(server.pid), signal.SIGKILL)
    page.get_by_role("alert").get_by_text("The request was lost").wait_for()
    page.locator("#health:not([data-state=up])").wait_for()
    picture(page, "page-engine-away")
    page.locator("#health[data-state=up]").wait_for()
    page.get_by_role("button", name="Regenerate").click()
    wait_for(lambda: any(len(answer) > 20 for answer in answers(page)), 60)
    page.keyboard.press("Escape")
    wait_idle(page)


def find_engine(supervisor: int) -> int:
    """Return the process id of a server's engine."""
    return children_of(supervisor, "engine")[0]
