"""Walks the pages that name code: every file, class and function in them exists, and no part is left out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/reading_order.md", "docs/operations.md", "CONTRIBUTING.md", "README.md")
REFERENCE = re.compile(r"`([\w/.]+\.(?:py|proto|md|sh))(?:::([\w.]+))?`")
READING_ORDER = (ROOT / "docs" / "reading_order.md").read_text()


def names_in(path: Path) -> set[str]:
    """Top-level names of a module, and ``Class.member`` for methods and fields."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for member in node.body for name in defined(member)}
        names |= defined(node)
    return names


def defined(node: ast.stmt) -> set[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
    return set()


@pytest.mark.parametrize("page", PAGES)
def test_every_name_on_the_page_exists(page: str) -> None:
    missing = []
    for file, name in REFERENCE.findall((ROOT / page).read_text()):
        path = ROOT / file
        if "NAME" in file:
            path = path.parent  # a file to be written
        if not path.exists():
            missing.append(file)
        elif name and name not in names_in(path):
            missing.append(f"{file}::{name}")
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_every_link_on_the_page_leads_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text())
    assert [link for link in links if "://" not in link and not ((ROOT / page).parent / link).exists()] == []


def test_the_hops_are_numbered_and_name_what_they_hand_over() -> None:
    hops = re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |^## |\Z)", READING_ORDER, re.MULTILINE | re.DOTALL)
    assert [int(number) for number, _ in hops] == list(range(1, len(hops) + 1))
    assert all(REFERENCE.search(text) for _, text in hops)


@pytest.mark.parametrize(
    "package",
    ["gateway", "router", "worker", "prefill_service", "decode_service", "engine", "kv_transfer", "registry"],
)
def test_every_part_is_on_the_way(package: str) -> None:
    assert f"`{package}/" in READING_ORDER
