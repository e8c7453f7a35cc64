"""The documentation: tutorials run as printed, every block in order; links lead somewhere; every
public name is in the reference."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import re
import runpy
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

import advbayes
from tests import forking

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
EXECUTED = ("tour", "tutorials/tables", "tutorials/images", "tutorials/foreign-model")
EXECUTED += ("tutorials/paper", "audit", "evaluation", "metrics")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"\d+\.\d+")


def blocks(text: str) -> list[tuple[str, str | None]]:
    """Python blocks and what they print: a `text` block that follows at once."""
    found: list[tuple[str, str | None]] = []
    end = -1
    for match in BLOCK.finditer(text):
        language, body = match.groups()
        if language == "python":
            found.append((body, None))
        elif language == "text" and not text[end : match.start()].strip() and found:
            found[-1] = found[-1][0], body
        end = match.end()
    return found


def same(printed: str, promised: str) -> bool:
    """The same words; numbers with a point may differ in what rounding and machines change.

    >>> same("0.95 clean", "0.96 clean"), same("0.95 clean", "0.75 clean"), same("1 a", "1 b")
    (True, False, False)
    """
    if NUMBER.sub("#", printed).split() != NUMBER.sub("#", promised).split():
        return False
    pairs = zip(NUMBER.findall(printed), NUMBER.findall(promised), strict=True)
    return all(abs(float(a) - float(b)) <= 0.06 + 0.1 * abs(float(b)) for a, b in pairs)


@pytest.mark.unshifted("pages print what one seed gave")
@pytest.mark.parametrize("page", EXECUTED)
def test_a_page_runs_as_printed(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": page}
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(verbose=False)
    for number, (code, promised) in enumerate(blocks((DOCS / f"{page}.md").read_text())):
        if ">>>" in code:
            test = parser.get_doctest(code, names, f"{page} {number}", page, 0)
            said = StringIO()
            runner.run(test, out=said.write, clear_globs=False)
            assert not said.getvalue(), said.getvalue()
            names |= test.globs
            continue
        said = StringIO()
        with redirect_stdout(said):
            exec(compile(code, f"{page}.md", "exec"), names)
        assert same(said.getvalue(), promised or ""), said.getvalue()


def test_other_blocks_are_python() -> None:
    """Fragments of the reference pages: they compile, and what they import is there."""
    for page in PAGES:
        for code, _ in blocks(page.read_text()):
            if ">>>" in code:
                continue
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("advbayes"):
                    home = importlib.import_module(str(node.module))
                    for alias in node.names:
                        module = f"{node.module}.{alias.name}"
                        there = hasattr(home, alias.name) or importlib.util.find_spec(module)
                        assert there, f"{page.name}: {module}"


def links(text: str) -> list[str]:
    plain = BLOCK.sub("", text)
    return re.findall(r"\]\((?!https?:)([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", plain))


def anchors(text: str) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda p: p.stem)
def test_links_lead_somewhere(page: Path) -> None:
    """Pages link to pages of the site (or pictures), with headings that exist."""
    for link in links(page.read_text()):
        place, _, heading = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), f"{page.name}: {link}"
        if page.is_relative_to(DOCS):
            inside = target.is_relative_to(DOCS) or target.suffix == ".svg"
            assert inside, f"{page.name}: {link} is not on the site"
        if heading:
            assert heading in anchors(target.read_text()), f"{page.name}: {link}"


def test_every_page_is_in_the_table_of_contents_and_in_the_readme() -> None:
    index, readme = (DOCS / "index.md").read_text(), (ROOT / "README.md").read_text()
    for page in PAGES:
        name = str(page.relative_to(DOCS).with_suffix(""))
        if name != "index":
            assert re.search(rf"^{name}$", index, re.MULTILINE), name
            assert f"(docs/{name}.md)" in readme, name


def test_every_public_name_is_in_the_reference() -> None:
    text = (DOCS / "api.md").read_text()
    listed = re.findall(r"^\.\. auto(?:class|function|exception):: (\w+)$", text, re.MULTILINE)
    assert sorted(listed) == advbayes.__all__


def test_the_diagrams_show_modules_of_the_layout_once_each() -> None:
    from tests.test_architecture import ORDER

    flows = runpy.run_path(str(DOCS / "figures" / "diagrams.py"))["FLOWS"]
    design = (DOCS / "design.md").read_text()
    for name, (_, boxes) in flows.items():
        rooms = [room for room, _ in boxes]
        assert len(rooms) == len(set(rooms)) <= 8
        assert set(rooms) <= {*ORDER, "torch.distributions"}
        assert f"figures/{name}.svg" in design
        assert all(room in (DOCS / "figures" / f"{name}.svg").read_text() for room in rooms)


@pytest.mark.parametrize("page", ["which-defense", "results"])
def test_quoted_tables_are_in_the_records(page: str) -> None:
    """The table after such a comment quotes the files that it names."""
    text = (DOCS / f"{page}.md").read_text()
    for file in re.findall(r"`((?:benchmarks/)?results/[^`]+)`", text):
        assert list(ROOT.glob(file)), file
    quoted = re.findall(r"<!-- from (.+?) -->\n(.*?)\n\n", text, re.DOTALL)
    assert len(quoted) == text.count("<!-- from ") > 0
    for files, table in quoted:
        places = [each for file in files.split(" and ") for each in sorted(ROOT.glob(file))]
        record = "".join(each.read_text() for each in places)
        for number in re.findall(r"\d\.\d{2,}", table):
            assert number in record, f"{number} is not in {files}"


def test_theory_names_code_and_tests_that_exist() -> None:
    for page in ("theory", "paper-map"):
        text = (DOCS / f"{page}.md").read_text()
        for name in set(re.findall(r"`(test_\w+)\.py", text)):
            assert (ROOT / "tests" / f"{name}.py").exists(), name
    for name in set(
        re.findall(r"`(test_[a-z_0-9]+\.py)::(\w+)`", (DOCS / "theory.md").read_text())
    ):
        assert f"def {name[1]}" in (ROOT / "tests" / name[0]).read_text(), name


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Everything is read and every reference resolved; `make docs` writes the pages as well."""
    pytest.importorskip("furo")
    argv = ["-W", "-q", "-b", "dummy", str(DOCS), str(tmp_path)]
    script = (
        "import sys, warnings\n"
        "from sphinx.cmd.build import main\n"
        "warnings.simplefilter('ignore')\n"  # of Python: Sphinx has its own
        f"sys.exit(main({argv!r}))\n"
    )
    done = forking.ran(script)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_site_loads_nothing_from_elsewhere() -> None:
    """Mathematics is drawn by files of the site, and pictures lie in it."""
    assert "sphinx-mathjax-offline" in (DOCS / "conf.py").read_text()
    for page in PAGES:
        assert not re.findall(r"!\[[^\]]*\]\(https?:", page.read_text()), page
