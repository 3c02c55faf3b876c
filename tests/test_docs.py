"""The docs against the code: their examples run as printed, their tables say what the code says, their links lead somewhere."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart import LLM, SamplingParams, config, verify
from headstart.config import EngineConfig, SpeculativeConfig, parse_speculative
from headstart.core import RequestSpeculation, Tree
from headstart.drafters import BUILT_IN, _factories
from tests import test_config, tiny
from tests.test_layers import MODULES, imports, name_of
from tests.test_verify import Enumerator, branches

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS]
OPTIONS, DESIGN = ROOT / "docs" / "options.md", ROOT / "docs" / "design.md"


# ------------------------------------------------------------------ reading Markdown
def read(path: Path) -> str:
    if not path.exists():
        pytest.skip(f"{path.name} is not written yet")
    return path.read_text(encoding="utf-8")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def block(page: str, name: str) -> str:
    """The code that stands behind `<!-- test: name -->`, as printed."""
    text = read(ROOT / "docs" / page)
    found = re.findall(rf"<!-- test: {re.escape(name)} -->\n```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(found) == 1, f"{page} has {len(found)} blocks named {name!r}"
    return found[0]


def table(path: Path, heading: str) -> list[list[str]]:
    """Rows of the first table under a heading, cell by cell."""
    section = re.split(r"^#+ ", read(path).split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    lines = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert lines, f"no table under {heading!r}"
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines[0].splitlines()[2:]]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def value(cell: str) -> Any:
    return ast.literal_eval(names(cell)[0])


def defaults(cls: Any) -> dict[str, Any]:
    return {f.name: f.default if f.default is not MISSING else f.default_factory() for f in fields(cls)}


def anchors(path: Path) -> set[str]:
    """How GitHub names the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", without_code(read(path)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}


# ------------------------------------------------------------------ examples run as printed
@pytest.mark.parametrize(("page", "name"), [("design.md", "worked example"), ("losslessness.md", "counterexample")])
def test_a_block_of_assertions_holds(page: str, name: str):
    code = block(page, name)
    assert "assert " in code
    exec(compile(code, name, "exec"), {})


@pytest.fixture
def my_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The drafter of the docs in a folder that Python finds."""
    code = block("drafters.md", "my_drafter.py")
    (tmp_path / "my_drafter.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_drafter", raising=False)
    monkeypatch.setattr("headstart.drafters._factories", dict(_factories))
    return code


def test_the_drafter_of_the_docs_has_at_most_ten_lines(my_drafter: str):
    assert len([line for line in my_drafter.splitlines() if line.strip()]) <= 10


@pytest.mark.parametrize("name", ["by name", "by dotted path"])
def test_a_drafter_of_your_own_as_printed(my_drafter: str, name: str, capsys: pytest.CaptureFixture[str]):
    space: dict[str, Any] = {"model": tiny.loaded()}
    exec(compile(block("drafters.md", name), name, "exec"), space)
    assert "go on without drafts" not in capsys.readouterr().err
    if name == "by name":
        assert space["drafted"].stats.drafted > 0


def test_the_drafter_of_the_docs_changes_nothing(my_drafter: str):
    """Also by vLLM's spelling, and where its drafts are accepted: a bias makes the text repeat itself."""
    spelling = {"method": "custom_class", "model": "my_drafter.Bigram"}
    params = SamplingParams(temperature=0.0, max_tokens=20, logit_bias={7: 1e3})
    with LLM(tiny.loaded(), speculative=spelling, kv_memory=1 << 22) as llm:
        ours = llm.generate("one two three one two three one", params)[0]
        plain = llm.generate("one two three one two three one", params, speculative=False)[0]
    assert ours.token_ids == plain.token_ids
    assert ours.stats.accepted > 0


@pytest.mark.parametrize(("keep_all", "a"), [(True, 0.5), (False, 0.6)])
def test_the_counterexample_is_what_rejection_does(keep_all: bool, a: float):
    """Two tokens, p = (1/2, 1/2), q = (4/5, 1/5): dropping a child because of its token biases the text."""
    p, q = torch.tensor([0.5, 0.5], dtype=torch.float64), torch.tensor([0.8, 0.2], dtype=torch.float64)

    def program(coins: Enumerator) -> int:
        child = coins.draw(q)
        tree = Tree([child], [-1], [0]) if keep_all or q[child] >= 0.5 else Tree()
        return verify.reject(tree, p.log().expand(2, -1), q.log()[None], coins).tokens(tree)[0]

    assert sum(w for token, w in branches(program) if token == 0) == pytest.approx(a, abs=1e-12)


# ------------------------------------------------------------------ options.md
SPOKEN = {"rejection_sample_method": "verification"}  # translated by its value, so not in ALIASES


def speculative_rows() -> dict[str, list[str]]:
    return {names(row[0])[0]: row for row in table(OPTIONS, "Speculative options")}


def test_every_speculative_option_with_its_default():
    assert {name: value(row[3]) for name, row in speculative_rows().items()} == defaults(SpeculativeConfig)
    assert list(speculative_rows()) == [f.name for f in fields(SpeculativeConfig)]


def test_every_name_from_elsewhere_stands_in_the_row_of_ours():
    told: dict[str, str] = {}
    for ours, (_, vllm, llama, _, meaning) in speculative_rows().items():
        also = meaning.split("also:")[1] if "also:" in meaning else ""
        for name in [*names(vllm), *names(llama), *names(also)]:
            assert told.setdefault(name, ours) == ours, f"{name} stands in two rows"
    assert {n: ours for n, ours in told.items() if n != ours} == config.ALIASES | SPOKEN


@pytest.mark.parametrize(("column", "theirs"), [(1, test_config.VLLM), (2, test_config.LLAMA_CPP)])
def test_columns_hold_the_names_that_vllm_and_llama_cpp_really_have(column: int, theirs: dict[str, tuple[Any, Any]]):
    told = {name: ours for ours, row in speculative_rows().items() for name in names(row[column])}
    mapped = {name: became[0] for name, (_, became) in theirs.items() if isinstance(became, tuple)}
    assert told == mapped


def test_the_spoken_alias_is_the_parsers():
    assert parse_speculative({"method": "ngram", "rejection_sample_method": "standard"})[0].verification == "rejection"


@pytest.mark.parametrize(
    ("heading", "code"), [("Accepted without effect", config.NO_EFFECT), ("Refused", config.REFUSED)]
)
def test_keys_without_effect_and_refused_keys_with_their_reasons(heading: str, code: dict[str, str]):
    assert {names(key)[0]: reason for key, reason in table(OPTIONS, heading)} == code


def test_methods_and_their_other_names():
    told = {names(method)[0]: names(also) for method, also in table(OPTIONS, "Methods")}
    assert {alias: method for method, also in told.items() for alias in also} == config.METHOD_ALIASES
    assert set(told) == {"none", "custom", *BUILT_IN}
    later = re.search(r"not available yet: ([^.]*)\.", read(OPTIONS))
    assert later and names(later[1]) == list(config.LATER)


def test_every_sampling_parameter_with_its_default():
    told = {names(name)[0]: value(default) for name, default, _ in table(OPTIONS, "Sampling parameters")}
    assert told == defaults(SamplingParams)
    assert list(told) == [f.name for f in fields(SamplingParams)]


def test_every_per_request_option_with_its_default():
    told = {names(name)[0]: value(default) for name, default, _ in table(OPTIONS, "Per-request options")}
    assert told == defaults(RequestSpeculation)


def test_every_engine_option_with_its_default():
    told = {names(name)[0]: value(default) for name, default, _ in table(OPTIONS, "Engine options")}
    real = {n: p.default for n, p in inspect.signature(LLM.__init__).parameters.items() if n != "self"}
    assert told == real
    assert defaults(EngineConfig).items() <= real.items()


def test_every_environment_variable():
    told = {names(row[0])[0] for row in table(OPTIONS, "Environment variables")}
    used = {v for path in (ROOT / "src").rglob("*.py") for v in re.findall(r"\bHEADSTART_[A-Z0-9_]+", read(path))}
    used = {v for v in used if not v.startswith("HEADSTART_SERVE")}  # one for each option, told as a rule
    assert told == used


def test_drafters_names_only_options_that_exist():
    page = read(ROOT / "docs" / "drafters.md")
    told = [name for line in page.splitlines() if line.startswith("| `") for name in names(line.split("|")[1])]
    known = {f.name for f in fields(SpeculativeConfig)} | {"none", *BUILT_IN}
    assert set(told) <= known
    assert {f.name for f in fields(SpeculativeConfig)} - set(re.findall(r"`(\w+)`", page)) <= {
        "batch_size_schedule", "method", "policy", "verification", "options",
    }  # fmt: skip


@pytest.mark.parametrize("method", sorted(BUILT_IN))
def test_each_drafter_tells_the_options_that_it_reads(method: str):
    heading = "Heads" if method in config.HEADS else method
    told = {name for row in table(ROOT / "docs" / "drafters.md", heading) for name in names(row[0])}
    everybody = {"num_speculative_tokens", "num_draft_nodes"}  # through the budget
    assert told - everybody == set(config.OWN_OPTIONS[method])


# ------------------------------------------------------------------ design.md
def source_map() -> list[str]:
    return [names(row[0])[0] for row in table(DESIGN, "Map of the source")]


def test_the_map_lists_every_module_and_nothing_else():
    real = {p.relative_to(ROOT).as_posix() for p in (ROOT / "src" / "headstart").rglob("*.py")}
    told = source_map()
    assert len(told) == len(set(told))
    assert set(told) - real == set(), "the map names files that do not exist"
    assert real - set(told) == set(), "add these to the map in docs/design.md"


def test_a_file_imports_only_what_stands_above_it_in_the_map():
    place = {path.removeprefix("src/headstart/"): i for i, path in enumerate(source_map())}
    place = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): i for name, i in place.items()}
    for path in MODULES:
        own = name_of(path)
        below = [o for o in imports(path) if o and o != own and place[o] > place[own]]
        assert not below, f"{own} stands above {below}, which it imports"


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_functions_and_classes_that_a_page_names_exist(path: Path):
    """`Class.member` and `name()` in the text are found in the source, and so are files."""
    text = without_code(read(path))
    source = "\n".join(read(p) for p in [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").glob("*.py")])
    for owner, member in re.findall(r"`([A-Z]\w+)\.(_?\w+)", text):
        assert re.search(rf"class {owner}\b", source), f"{path.name} names {owner}, which is no class"
        assert re.search(rf"(def {member}\b|\b{member}\s*[:=])", source), f"{path.name} names {owner}.{member}"
    for file in re.findall(r"`((?:src|tests|benchmarks|docs)/[\w/.]+\.\w+)`", text):
        assert (ROOT / file).is_file(), f"{path.name} names {file}, which does not exist"


# ------------------------------------------------------------------ links, targets, flags
@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_relative_links_lead_somewhere(path: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(read(path))):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), f"{path.name} links to {target}"
        assert not anchor or anchor in anchors(found), f"{path.name} links to {target}: no such heading"


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_make_targets_and_flags_exist(path: Path):
    text = read(path)
    makefile, source = read(ROOT / "Makefile"), "\n".join(read(p) for p in (ROOT / "src/headstart/cli").glob("*.py"))
    for target in re.findall(r"(?:^|`)make (\w+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{path.name}: make {target}"
    for flag in flags(text):
        assert any(form in source for form in (f'"{flag}"', f'{flag}"', f'"{flag}/')), f"{path.name}: {flag}"


def flags(text: str) -> Sequence[str]:
    """Options of the command line, as `--name` in backquotes or behind `headstart`."""
    lines = [*names(without_code(text)), *re.findall(r"^headstart .*$", text, re.MULTILINE)]
    ours = [line for line in lines if line.startswith(("--", "headstart "))]
    return [flag for line in ours for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", line)]


def test_the_licence_is_whole():
    text = read(ROOT / "LICENSE")
    assert text.lstrip().startswith("Apache License") and "END OF TERMS AND CONDITIONS" in text
    for number in range(1, 10):
        assert re.search(rf"^   {number}\. ", text, re.MULTILINE)
    assert text.rstrip().endswith("limitations under the License.")


def test_published_tables_are_those_of_the_kept_results() -> None:
    """`make bench` and `make engines` write them; nobody edits them."""
    from benchmarks import published
    from headstart.bench.records import Result

    for table in published.TABLES:
        if table.result.is_file():
            text = read(table.file)
            assert published.put(table, text, published.render(table, Result.load(table.result))) == text, table.name
