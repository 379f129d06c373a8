# SPDX-License-Identifier: Apache-2.0
"""The chat page in a real browser, in front of a scripted server: what it draws, keeps, exports, and never does.

With BLINK_SCREENSHOTS set to a folder, pictures of the page are kept there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from browser import Browser, Page, run_browser
from processes import wait_for
from scripted_chat import MODEL, ScriptedChat, serve_script

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]
_SECONDS = 30_000  # milliseconds that anything may take
_FOLDER = Path(__file__).parent

_MARKDOWN = """## A sorted list

The function **merges** two lists, in *linear* time, as `heapq.merge` does:

```python
def merge(left: list[int], right: list[int]) -> list[int]:
    \"\"\"Return all numbers in order.\"\"\"
    merged = []
    while left and right:
        source = left if left[0] <= right[0] else right
        merged.append(source.pop(0))  # slow: O(n)
    return merged + left + right
```

| way | time | memory |
|---|--:|--:|
| `sorted` | $O(n \\log n)$ | $O(n)$ |
| merge | $O(n)$ | $O(n)$ |

1. Both lists must be sorted.
2. The price of $5 and the one of $10 stay prices.

> Measure before you choose. See [the docs](https://docs.python.org/3/library/heapq.html).

- [x] done
- [ ] to do
"""
_MATH = (
    "The roots are \\(x_1 = 2\\) and $x_2 = 3$, since\n\n"
    "$$x = \\frac{-b \\pm \\sqrt{b^2 - 4ac}}{2a} = \\frac{5 \\pm 1}{2}$$\n\n"
    "\\[\\overrightarrow{AB} = \\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}, "
    "\\quad \\widehat{xyz}, \\cancel{5}\\]\n\n"
    "Broken: $\\frac{1$, hostile: $\\href{javascript:alert(1)}{x} \\includegraphics{https://foreign.example/a.png}$"
)
_HOSTILE = """<script>window.hacked = 1</script>

<img src=x onerror="window.hacked = 1"> and <svg onload=window.hacked=1></svg>

[click](javascript:window.hacked=1) [data](data:text/html,<script>1</script>) [file](//foreign.example/x)
[vb](vbscript:x) <javascript:window.hacked=1> [ok](https://example.org/)

![a picture](https://foreign.example/pixel.png) <a href="javascript:window.hacked=1" onclick="window.hacked=1">raw</a>

<iframe src="https://foreign.example"></iframe><style>body { display: none }</style>
<form action="https://foreign.example"><input name=a></form><math><mi xlink:href="javascript:1">m</mi></math>

```html"><img src=x onerror=window.hacked=1>
<img src=x onerror=window.hacked=1>
```

<b style="position:fixed">bold</b> H<sub>2</sub>O
"""
_CALL = [
    {"reasoning_content": "The user wants the weather. "},
    {"reasoning_content": "There is a tool for it."},
    {
        "tool_calls": [
            {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}
        ]
    },
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '"Rome"}'}}]},
]


def spell(text: str) -> list[dict[str, str]]:
    """Return a text as small deltas."""
    return [{"content": text[at : at + 7]} for at in range(0, len(text), 7)]


REPLIES: dict[str, list[dict[str, Any]]] = {
    "sorted": spell(_MARKDOWN),
    "roots": spell(_MATH),
    "hostile": spell(_HOSTILE),
    "weather": _CALL,
    "18 degrees": spell("It is **18** degrees in Rome."),
    "think": [{"reasoning_content": "Let me *think* about it.\n\nStep two."}, *spell("The answer is 42.")],
    "slow": [*spell("A slow answer begins"), {"wait": True}, *spell(" and ends.")],
    "first": spell("The first answer."),
    "other": spell("The other answer."),
}


@pytest.fixture(scope="module")
def chat() -> Iterator[ScriptedChat]:
    with serve_script(REPLIES) as chat:
        yield chat


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with run_browser() as browser:
        yield browser


@contextmanager
def open_page(browser: Browser, chat: ScriptedChat, **options: Any) -> Iterator[Page]:
    """A page in a browser of its own, in which nothing may go wrong and nothing be asked of another host."""
    chat.bodies.clear()
    chat.go_on.clear()
    chat.unavailable = ""
    context = browser.new_context(**{"viewport": {"width": 1180, "height": 800}, "color_scheme": "light", **options})
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=chat.url)
    context.set_default_timeout(_SECONDS)
    faults: list[str] = []

    def is_allowed(url: str) -> bool:
        return url.startswith((chat.url, f"blob:{chat.url}"))

    def is_fault(said: Any) -> bool:
        return said.type in ("error", "warning") and not (chat.unavailable and "503" in said.text)

    def watch(page: Page) -> None:
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: is_fault(said) and faults.append(said.text))
        page.on("request", lambda request: is_allowed(request.url) or faults.append(f"asked {request.url}"))

    context.on("page", watch)
    context.add_init_script(
        "window.violations = [];"
        "document.addEventListener('securitypolicyviolation',"
        " (event) => violations.push(event.violatedDirective + ' ' + event.sourceFile + ':' + event.lineNumber));"
    )
    page = context.new_page()
    page.goto(chat.url)
    page.locator("#health[data-state=up]").wait_for()
    yield page
    violations = page.evaluate("window.violations")
    hacked = page.evaluate("window.hacked")
    context.close()
    assert (faults, violations, hacked) == ([], [], None)


@pytest.fixture
def page(browser: Browser, chat: ScriptedChat) -> Iterator[Page]:
    with open_page(browser, chat) as page:
        yield page


def say(page: Page, text: str, *, wait: bool = True) -> None:
    """Send a message by keyboard alone."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    page.locator("li.user", has_text=text).last.wait_for()
    if wait:
        wait_idle(page)


def wait_idle(page: Page) -> None:
    """Wait until no answer is being streamed."""
    page.get_by_role("button", name="Send").wait_for()
    page.locator("li.streaming").wait_for(state="detached")


def answers(page: Page) -> list[str]:
    return page.locator("li.assistant .body").all_inner_texts()


def titles(page: Page) -> list[str]:
    return page.locator("#conversations .title").all_inner_texts()


def picture(page: Page, name: str) -> None:
    if folder := os.environ.get("BLINK_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def test_markdown_has_structure_colours_and_copy_buttons(page: Page) -> None:
    say(page, "Merge sorted lists")
    answer = page.locator("li.assistant .body")
    assert answer.locator("h2").inner_text() == "A sorted list"
    assert answer.locator("th").all_inner_texts() == ["way", "time", "memory"]
    assert "$5 and the one of $10 stay prices" in answer.inner_text()
    code = answer.locator(".code")
    assert code.locator(".hljs-keyword").count() >= 5 and code.locator(".hljs-comment").count() == 1
    keyword, plain = (code.locator(each).first for each in (".hljs-keyword", "pre"))
    assert colour_of(keyword) != colour_of(plain)
    code.get_by_role("button", name="Copy").click()
    code.get_by_role("button", name="Copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == _MARKDOWN.partition("```python\n")[2].partition("\n```")[0]
    link = answer.locator("a")
    assert (link.get_attribute("target"), link.get_attribute("rel")) == ("_blank", "noopener noreferrer")
    picture(page, "chat-light")
    page.emulate_media(color_scheme="dark")
    picture(page, "chat-dark")


def colour_of(locator: Any) -> str:
    return locator.evaluate("(element) => getComputedStyle(element).color")


def test_formulas_are_drawn_with_fonts_of_this_server_and_broken_ones_stay_text(page: Page) -> None:
    say(page, "What are the roots?")
    page.locator(".katex").first.wait_for()
    assert page.locator(".katex").count() == 5 and page.locator(".katex-display").count() == 2
    assert page.locator("[style]", has=page.locator("svg")).count() > 0
    assert page.evaluate("document.fonts.ready.then(() => document.fonts.check('16px KaTeX_Main'))")
    assert (
        page.locator(".undrawn").all_inner_texts() == ["\\frac{1"] and page.locator(".katex a, .katex img").count() == 0
    )
    picture(page, "chat-math")


def test_hostile_text_stays_text(page: Page) -> None:
    say(page, "hostile")
    answer = page.locator("li.assistant .body")
    text = answer.inner_text()
    for shown in (
        "<script>window.hacked = 1</script>",
        '<img src=x onerror="window.hacked = 1">',
        "<iframe",
        "<style>",
    ):
        assert shown in text
    bad = "img, svg, script, iframe, style, form, input, object, embed, mi, [onerror], [onclick], [onload], [style]"
    assert answer.locator(bad).count() == 0
    links = [link.get_attribute("href") for link in answer.locator("a[href]").all()]
    assert links == ["https://example.org/", "https://foreign.example/pixel.png"]
    assert answer.locator("sub").inner_text() == "2"
    page.reload()
    page.locator("li.assistant").wait_for()
    assert answer.inner_text() == text
    picture(page, "chat-hostile")


def test_markup_in_a_question_or_a_title_stays_text(page: Page) -> None:
    question = "<img src=x onerror=window.hacked=1> first"
    say(page, question)
    assert page.locator("li.user .body").inner_text() == question and titles(page) == [question]
    assert page.locator("#chat img").count() == 0


def test_thinking_is_folded_and_calls_are_shown_and_answered(page: Page, chat: ScriptedChat) -> None:
    say(page, "think")
    thinking = page.locator("details.thinking")
    assert thinking.get_attribute("open") is None and "Thought for" in thinking.locator("summary").inner_text()
    assert not thinking.get_by_text("Step two.").is_visible()
    thinking.locator("summary").click()
    assert thinking.get_by_text("Step two.").is_visible() and thinking.locator("em").inner_text() == "think"
    say(page, "What is the weather in Rome?")
    call = page.locator("li.assistant details.call")
    assert "weather" in call.locator("summary").inner_text()
    assert json.loads(call.locator("pre").inner_text()) == {"city": "Rome"}
    call.get_by_label("Result of weather").fill("18 degrees")
    picture(page, "chat-tools")
    call.get_by_role("button", name="Give the result").click()
    page.get_by_text("It is 18 degrees in Rome.").wait_for()
    wait_idle(page)
    told = chat.bodies[-1]["messages"]
    assert told[-1] == {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees"}
    assert told[-2]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert told[-2]["reasoning_content"] == "The user wants the weather. There is a tool for it."


def test_a_question_is_edited_and_an_answer_regenerated_and_no_version_is_lost(page: Page, chat: ScriptedChat) -> None:
    say(page, "first question")
    say(page, "think of more")
    page.locator("li.user").first.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the question").fill("other question")
    page.keyboard.press("Enter")
    page.get_by_text("The other answer.").wait_for()
    wait_idle(page)
    assert [len(body["messages"]) for body in chat.bodies] == [1, 3, 1] and len(answers(page)) == 1
    page.get_by_role("button", name="Regenerate").click()
    wait_for(lambda: len(chat.bodies) == 4, 30)
    wait_idle(page)
    assert chat.bodies[3]["messages"] == chat.bodies[2]["messages"]
    assert "2/2" in page.locator("li.assistant .versions").inner_text()
    page.locator("li.user").get_by_role("button", name="Earlier version").click()
    assert answers(page) == ["The first answer.", "The answer is 42."]
    page.reload()
    page.get_by_text("The answer is 42.").wait_for()
    page.locator("li.user").first.get_by_role("button", name="Later version").click()
    assert answers(page) == ["The other answer."]


def test_conversations_are_kept_renamed_and_deleted(page: Page) -> None:
    say(page, "first")
    page.get_by_role("button", name="New conversation").click()
    assert page.locator("#welcome").is_visible()
    say(page, "other")
    assert titles(page) == ["other", "first"]
    page.reload()
    page.get_by_text("The other answer.").wait_for()  # the one that was open
    page.locator("#conversations").get_by_role("button", name="first", exact=True).click()
    assert answers(page) == ["The first answer."]
    page.get_by_role("button", name="Rename first").click()
    page.get_by_label("Title").fill("Another title")
    page.keyboard.press("Enter")
    assert sorted(titles(page)) == ["Another title", "other"]
    page.get_by_role("button", name="Delete other").click()
    picture(page, "chat-delete")
    page.get_by_role("button", name="Keep").click()
    assert len(titles(page)) == 2
    page.get_by_role("button", name="Delete other").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.reload()
    page.get_by_text("The first answer.").wait_for()
    assert titles(page) == ["Another title"]


def test_an_answer_goes_on_while_another_conversation_is_shown(page: Page, chat: ScriptedChat) -> None:
    say(page, "slow", wait=False)
    page.get_by_text("A slow answer begins").wait_for()
    page.get_by_role("button", name="New conversation").click()
    say(page, "first")
    chat.go_on.set()
    page.locator("#conversations").get_by_role("button", name="slow", exact=True).click()
    page.get_by_text("A slow answer begins and ends.").wait_for()


def test_stop_keeps_what_has_come(page: Page) -> None:
    say(page, "slow", wait=False)
    page.get_by_text("A slow answer begins").wait_for()
    page.get_by_role("button", name="Stop").click()
    wait_idle(page)
    assert answers(page) == ["A slow answer begins"] and "stopped" in page.locator("li.assistant small").inner_text()


def test_another_tab_shows_the_same_conversations(page: Page, chat: ScriptedChat) -> None:
    other = page.context.new_page()
    other.goto(chat.url)
    other.locator("#health[data-state=up]").wait_for()
    say(page, "first")
    other.locator("#conversations").get_by_role("button", name="first", exact=True).click()
    assert answers(other) == ["The first answer."]
    page.get_by_role("button", name="Delete first").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    other.locator("#conversations .title").wait_for(state="detached")


def test_a_conversation_is_exported(page: Page) -> None:
    say(page, "think, first of all")
    exported = {}
    for name in ("Markdown", "JSON"):
        with page.expect_download() as waiting:
            page.get_by_role("button", name=name).click()
        exported[waiting.value.suggested_filename] = Path(waiting.value.path()).read_text()
    assert list(exported) == ["think-first-of-all.md", "think-first-of-all.json"]
    markdown, document = exported.values()
    assert markdown.startswith("# think, first of all\n\n## Question\n") and "The answer is 42." in markdown
    told = json.loads(document)
    assert (told["title"], told["model"]) == ("think, first of all", MODEL)
    assert [message["role"] for message in told["messages"]] == ["user", "assistant"]


def test_while_the_model_loads_the_page_says_so_and_keeps_the_question(page: Page, chat: ScriptedChat) -> None:
    chat.unavailable = "Not available: the engine is not running or still starting."
    page.locator("#health[data-state=starting]").wait_for()
    assert (
        page.locator("#health").inner_text() == "starting" and "being loaded" in page.locator("#waiting").inner_text()
    )
    page.get_by_label("Message", exact=True).fill("first")
    page.keyboard.press("Enter")
    page.get_by_role("alert").get_by_text("still being loaded").wait_for()
    assert page.get_by_label("Message", exact=True).input_value() == "first" and chat.bodies == []
    picture(page, "chat-starting")
    chat.unavailable = ""
    page.locator("#health[data-state=up]").wait_for()
    page.keyboard.press("Enter")
    page.get_by_text("The first answer.").wait_for()


def test_an_example_is_a_click_away(page: Page, chat: ScriptedChat) -> None:
    picture(page, "chat-empty")
    page.get_by_role("button", name="Write a Python function").click()
    page.locator("li.assistant .code").wait_for()
    assert "merges two sorted lists" in chat.bodies[0]["messages"][0]["content"]


def test_parameters_and_tools_are_sent_and_kept(page: Page, chat: ScriptedChat) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    page.get_by_text("Parameters").click()
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("System message").fill("Be brief.")
    page.get_by_label("Thinking").select_option("off")
    page.get_by_label("Tools, as a JSON list").fill("{")
    picture(page, "chat-parameters")
    page.get_by_label("Message", exact=True).fill("first")
    page.keyboard.press("Enter")
    page.get_by_role("alert").get_by_text("The tools are no JSON").wait_for()
    page.get_by_label("Tools, as a JSON list").fill(json.dumps(tools))
    page.reload()
    say(page, "first")
    body = chat.bodies[0]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["tools"], body["model"]) == (0.5, tools, MODEL)
    assert body["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}


def test_the_switch_of_colours_outlives_a_reload(page: Page) -> None:
    def background() -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    light = background()
    for _ in range(2):
        page.get_by_role("button", name="Colours").click()
    dark = background()
    page.reload()
    assert background() == dark != light
    page.get_by_role("button", name="Colours: dark").click()
    assert background() == light


def test_all_is_reached_by_keyboard(page: Page) -> None:
    say(page, "sorted first")
    reached: set[str] = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("document.activeElement?.ariaLabel || document.activeElement?.textContent?.trim() || ''")
        )
    wanted = {
        "Chat",
        "State",
        "API key",
        "New conversation",
        "Rename sorted first",
        "Delete sorted first",
        "Parameters",
    }
    assert wanted | {"Markdown", "JSON", "Copy", "Edit", "Regenerate", "Send"} <= reached


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_is_wider_than_the_screen_and_the_list_unfolds(
    browser: Browser, chat: ScriptedChat, scheme: str
) -> None:
    options = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True, "color_scheme": scheme}
    with open_page(browser, chat, **options) as page:
        picture(page, f"chat-phone-empty-{scheme}")
        say(page, "sorted roots")
        say(page, "What are the roots?")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        picture(page, f"chat-phone-{scheme}")
        assert not page.locator("#new").is_visible()
        page.get_by_role("button", name="Conversations").click()
        page.locator("#new").wait_for()
        page.wait_for_timeout(300)
        picture(page, f"chat-phone-list-{scheme}")
        page.get_by_role("button", name="New conversation").click()
        page.locator("#new").wait_for(state="hidden")
        assert page.locator("#welcome").is_visible()


def test_the_description_of_the_api_loads_nothing_from_elsewhere(page: Page, chat: ScriptedChat) -> None:
    page.goto(f"{chat.url}/docs")
    assert page.locator("h1").inner_text().startswith("Blink")
    picture(page, "docs")
