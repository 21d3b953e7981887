"""Pieces of a self-contained page: everything from a file is escaped, nothing is loaded from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

STYLE = """
:root { color-scheme: light dark; --ink: #1d2327; --soft: #5b656d; --line: #dfe3e6; --paper: #fff; --card: #f5f7f8;
  --accent: #0b6e4f }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9eb; --soft: #9aa5ad; --line: #343b41; --paper: #15191c;
  --card: #1e2428; --accent: #52b788 } }
body { margin: 0 auto; max-width: 66rem; padding: 1.5rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.7rem; margin: 0.5rem 0 } h2 { font-size: 1.35rem; margin: 3rem 0 0.5rem; padding-top: 1rem;
  border-top: 2px solid var(--line) } h3 { font-size: 1.05rem; margin: 2rem 0 0.4rem }
p, figcaption { max-width: 50rem } a { color: var(--accent) } small, .soft { color: var(--soft) }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: 0.7rem; padding: 0;
  margin: 1rem 0; list-style: none }
.cards li { background: var(--card); border-radius: 0.5rem; padding: 0.7rem 0.9rem }
.cards b { display: block; font-size: 1.3rem; font-variant-numeric: tabular-nums }
figure { margin: 1.5rem 0 2.2rem } figure h3 { margin-top: 0 } figcaption { margin-bottom: 0.6rem }
img { display: block; max-width: 100%; background: #fff; border-radius: 0.4rem; border: 1px solid var(--line) }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: 0.25rem 0.7rem; border-bottom: 1px solid var(--line); white-space: nowrap }
.long td, .numbers th, .numbers td:last-child { white-space: normal }
.numbers { overflow-wrap: normal } .numbers th { vertical-align: bottom }
.numbers td, .numbers th { padding: 0.25rem 0.5rem }
.numbers td:not(:first-child), .numbers th:not(:first-child) { text-align: right }
summary { cursor: pointer; margin: 1rem 0 0.5rem; font-weight: 600 }
"""
# In case an escape is missing: the browser runs no script and loads nothing.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page(title: str, body: Iterable[str]) -> str:
    head = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{STYLE}</style>\n</head>\n'
    )
    return head + "<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"


def heading(level: int, text: str, anchor: str = "") -> str:
    mark = f' id="{escape(anchor)}"' if anchor else ""
    return f"<h{level}{mark}>{escape(text)}</h{level}>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def cards(items: Iterable[tuple[str, str, str]]) -> str:
    """(what, how much, a remark) of each headline number."""
    made = (
        f"<li><small>{escape(what)}</small><b>{escape(much)}</b><small>{escape(remark)}</small></li>"
        for what, much, remark in items
    )
    return f'<ul class="cards">{"".join(made)}</ul>'


def picture(title: str, sentence: str, png: Path) -> str:
    data = base64.b64encode(png.read_bytes()).decode()
    return (
        f"<figure><h3>{escape(title)}</h3><figcaption>{escape(sentence)}</figcaption>"
        f'<img alt="{escape(sentence)}" src="data:image/png;base64,{data}"></figure>'
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """kind: "numbers" sets all but the first column to the right, "long" lets text wrap."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'


def folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def links(targets: Iterable[tuple[str, str]]) -> str:
    """(anchor on this page, text) of each."""
    made = (f'<a href="#{escape(anchor)}">{escape(text)}</a>' for anchor, text in targets)
    return f"<p>{' · '.join(made)}</p>"
