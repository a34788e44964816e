"""What pages for operators say can be recomputed or stands in the code: sizes, formats, reasons, lines of the log."""

from __future__ import annotations

import ast
import re

from documents import PACKAGES, ROOT
from kvpact.identity.keys import KEY_FORMAT
from kvpact.metrics import MissReason
from kvpact.tiers.disk.superblock import SLAB_FORMAT
from kvpact.tiers.objects.packs import PACK_FORMAT
from kvpact.tiers.record import HEADER_BYTES, RECORD_FORMAT
from kvpact.vllm.identity import FORMAT

OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
TROUBLE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")

PROMPTS, TOKENS, NUMBER_BYTES = 1000, 4096, 2
"""What the last column of the table of sizes is for."""


def rows(page: str, head: str) -> list[list[str]]:
    """The cells of the table whose head begins so, without its first two lines."""
    lines = page[page.index(f"| {head} |") :].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def kv_bytes_per_token(layers: int, heads: int, dimension: int, tensors: int) -> int:
    """Bytes of keys and values that one token takes in all layers."""
    return layers * heads * dimension * tensors * NUMBER_BYTES


def test_sizes_are_what_their_rows_make() -> None:
    sizes = rows(OPERATIONS, "model | layers")
    for model, *shape, per_token, gibibytes in sizes:
        computed = kv_bytes_per_token(*map(int, shape))
        assert f"{computed:,}" == per_token, model
        assert f"{PROMPTS * TOKENS * computed / 2**30:.0f}" == gibibytes, model
    assert len(sizes) >= 10
    assert [int(row[5].replace(",", "")) for row in sizes] == sorted(int(row[5].replace(",", "")) for row in sizes)
    assert f"with {HEADER_BYTES} bytes that describe it" in OPERATIONS


def test_formats_have_the_numbers_of_this_release() -> None:
    found = {what: number for what, number, _ in rows(OPERATIONS, "what | number now")}
    assert list(found.values()) == [str(each) for each in (KEY_FORMAT, RECORD_FORMAT, SLAB_FORMAT, PACK_FORMAT, FORMAT)]


def test_every_reason_of_a_miss_has_a_row() -> None:
    assert {row[0].strip("`") for row in rows(TROUBLE, "reason")} == {*MissReason}


def test_lines_of_the_log_are_quoted_as_they_are() -> None:
    said = [
        node.value
        for package in PACKAGES
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    quoted = [text.replace('\\"', '"') for text in re.findall(r'`"((?:[^`"\\]|\\")+ (?:[^`"\\]|\\")+)"`', TROUBLE)]
    assert len(quoted) > 25
    assert [text for text in quoted if not any(text in each for each in said)] == []


def test_each_symptom_of_the_page_has_what_one_sees_and_what_to_do() -> None:
    symptoms = TROUBLE.split("\n## ")[1:]
    assert len(symptoms) >= 9
    tables = [symptom.count("| what to do |") for symptom in symptoms]
    assert [symptom.splitlines()[0] for symptom, count in zip(symptoms, tables, strict=True) if not count] == [
        "An answer differs"
    ]


def test_the_first_hour_has_been_played_as_a_whole_or_not_at_all() -> None:
    """`python scripts/play_first_hour.py` writes what was typed and answered."""
    page = (ROOT / "docs" / "first-hour.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"<!-- played: (\w+) -->\n```text\n(.*?)```", page, re.DOTALL))
    assert blocks.keys() == {"serve", "restart", "dies", "own"}
    if any(blocks.values()):
        seen = {name: "$ kvpact status\n" in text and "served from cache" in text for name, text in blocks.items()}
        assert all(seen.values()), seen
        assert ("(exit code 1)" in blocks["dies"], "(exit code 1)" in blocks["restart"]) == (True, False)
