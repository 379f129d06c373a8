# SPDX-License-Identifier: Apache-2.0
"""The page at /: whole, from this server alone, without a key, and not there when it is turned off."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

import blink.api.pages
from blink.api.pages.files import page_routes

_FOLDER = Path(blink.api.pages.__file__).parent / "static"


def get(path: str, method: str = "GET") -> httpx.Response:
    app = FastAPI()
    app.include_router(page_routes())

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.request(method, path)

    return asyncio.run(ask())


def test_every_file_that_the_page_names_is_served_with_its_type() -> None:
    page = get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    named = set(re.findall(r'(?:src|href)="(page/[\w.]+)"', page.text))
    for script in _FOLDER.glob("*.js"):
        named |= {f"page/{name}" for name in re.findall(r'from "\./([\w.]+)"', script.read_text())}
    kinds = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert {"page/page.css", "page/chat.js", "page/state.js", "page/figures.js"} <= named
    for path in named:
        response = get(f"/{path}")
        assert response.status_code == 200 and response.text
        assert response.headers["content-type"].startswith(kinds[path.rpartition(".")[2]])


def test_the_browser_is_told_to_load_nothing_from_elsewhere() -> None:
    response = get("/")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    foreign = [
        (file.name, found)
        for file in _FOLDER.iterdir()
        for found in re.findall(r"https?://[\w./-]+", file.read_text())
        if found != "http://www.w3.org/2000/svg"  # a name, which nobody fetches
    ]
    assert foreign == []


def test_markup_holds_neither_scripts_nor_styles_of_its_own() -> None:
    text = (_FOLDER / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", text)
    for script in _FOLDER.glob("*.js"):
        assert "innerHTML" not in script.read_text(), "what a model says must stay text"


@pytest.mark.parametrize("path", ["/", "/page/page.js"])
def test_head_is_answered_without_a_body(path: str) -> None:
    response = get(path, "HEAD")
    assert response.status_code == 200 and not response.content


def test_every_field_has_a_label() -> None:
    text = (_FOLDER / "index.html").read_text()
    fields = re.findall(r"<(?:input|textarea|select)[^>]*id=\"(\w+)\"", text)
    wrapped = re.findall(r"<label[^>]*>[^<]*<(?:input|textarea|select)[^>]*id=\"(\w+)\"", text.replace("\n", ""))
    named = re.findall(r"<label[^>]*for=\"(\w+)\"", text)
    assert len(fields) > 8 and set(fields) == {*wrapped, *named}
