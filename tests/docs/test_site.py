"""The documentation's site builds without a warning, has every public name, and contains no broken link."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from sphinx.util.inventory import InventoryFile

import nblaunch
from nblaunch import cli, compat
from tests.architecture.source import ROOT, listing
from tests.docs.conftest import BUILD_S

MODULES = [*compat.FILES, "nblaunch.errors", "nblaunch.training.strategies"]

pytestmark = pytest.mark.timeout(BUILD_S + 60)  # the first test builds the site


class _Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attributes if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if "src" in values or tag == "link":
            self.loaded.add(values.get("src") or values["href"])
        elif "href" in values:
            self.links.add(values["href"])


@cache
def _page(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def _is_elsewhere(address: str) -> bool:
    return address.startswith(("http:", "https:", "//", "mailto:", "data:"))


def test_every_public_name_is_in_the_index(site: Path) -> None:
    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    described = {name for kind in inventory.data for name in inventory.data[kind]}
    wanted = {f"nblaunch.{name}" for name in nblaunch.__all__}
    wanted |= {f"{module}.{name}" for module in compat.FILES for name in compat.HOMES[module]}
    missing = sorted(name for name in wanted if name not in described)
    assert len(wanted) > 200
    assert not missing, f"not in docs/reference:{listing(missing)}"


def test_every_command_has_a_section(site: Path) -> None:
    anchors = _page(site / "docs" / "reference" / "commands.html").anchors
    assert {f"nblaunch-{command}" for command in cli.COMMANDS} <= anchors


def test_internal_links_are_valid(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    broken = defaultdict(set)
    for path in pages:
        for address in _page(path).links | _page(path).loaded:
            if _is_elsewhere(address):
                continue
            file, anchor = urldefrag(address.partition("?")[0] if "#" not in address else address)
            target = (path.parent / unquote(file)).resolve() if file else path
            is_there = target.is_file() and (
                not anchor or target.suffix != ".html" or anchor in _page(target).anchors
            )
            if not is_there:
                broken[address].add(path.relative_to(site).as_posix())
    assert not broken, listing(
        [f"{address} in {sorted(where)[:3]}" for address, where in sorted(broken.items())]
    )


def test_the_site_loads_no_external_files(site: Path) -> None:
    """The site, including its search, works without a network."""
    loaded = {
        address for path in site.rglob("*.html") for address in _page(path).loaded if _is_elsewhere(address)
    }
    assert {address for address in loaded if not address.startswith("data:")} == set()
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    assert "notebook_launcher" in index
    assert "kaggl" in index  # a word from a page, in the stemmed form of the search index


def test_the_notebooks_are_pages(site: Path) -> None:
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert (site / "notebooks" / f"{path.stem}.html").is_file()
