"""The page of the first hour is what is typed: its commands in a shell, on real servers, print what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from documents import ROOT, load_script

FIRST_HOUR = load_script("scripts/play_first_hour.py")

MASKS = (
    (r"cmpl-[0-9a-f]+(-0-[0-9a-f]+)?", "ID"),
    (r"(?<![\d.,])0(\.0+)?(?![\d.,]*[1-9])", "ZERO"),
    (r"\b\d[\d,]*(\.\d+)?", "N"),
    (r"\bN (ms|s|min)( N s)?\b", "TIME"),
    (r"\bN failures?\b", "FAILURES"),
    (r"(is down for TIME): .*? Connection refused\.(?= exit code)", r"\1"),  # one call fails or more
)
"""What differs from one run to the next. That something is zero does not, nor does any word."""


def masked(lines: str) -> str:
    text = " ".join(lines.split())
    for pattern, mark in MASKS:
        text = re.sub(pattern, mark, text)
    return text


def blocks(page: str) -> dict[str, str]:
    return {block["name"]: masked(block["lines"]) for block in FIRST_HOUR.BLOCK.finditer(page)}


def test_what_is_compared_is_words_and_zeros() -> None:
    dies = "redis is down for {}: cannot {}: Connection refused. exit code 1"
    same = [
        (
            '"id":"cmpl-ac3a" "prompt_tokens":1607 "cached_tokens":0',
            '"id":"cmpl-b1" "prompt_tokens":98 "cached_tokens":0',
        ),
        ("from disk 13.6%, 7% of 1,024 blocks full", "from disk 9.0%, 10% of 1,000 blocks full"),
        (dies.format("12 s", "read"), dies.format("2 min 3 s", "write")),
    ]
    other = [
        ('"cached_tokens":0', '"cached_tokens":128'),
        ("from disk 0.0%", "from disk 0.4%"),
        ("found blocks 0-11 in disk", "found blocks 0-11 in memory"),
        ("prefill time saved 0.0 s", "prefill time saved 3.8 s"),
    ]
    assert all(masked(one) == masked(two) for one, two in same)
    assert not any(masked(one) == masked(two) for one, two in other)


def test_nothing_is_hidden_and_every_block_of_a_terminal_is_typed() -> None:
    page = FIRST_HOUR.PAGE.read_text()
    assert page.count("```console") == len(blocks(page)) == 4
    assert "KVPACT_" not in page
    (from_where,) = set(re.findall(r"git clone (\S+)", page))
    assert f"`git clone {from_where} &&" in (ROOT / "README.md").read_text().splitlines()[4]
    assert page.index("git clone") < page.index("```console")


@pytest.mark.proof
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_the_commands_of_the_page_print_what_it_shows(tmp_path: Path) -> None:
    page = FIRST_HOUR.PAGE.read_text()
    (home := tmp_path / "home").mkdir()
    shown, typed = blocks(page), blocks(FIRST_HOUR.with_answers(page, FIRST_HOUR.play(page, home)))
    assert list(shown) == ["model", "serve", "restart", "dies"]
    for name, text in shown.items():
        assert typed[name] == text, name
