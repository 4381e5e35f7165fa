"""What the documentation says is true, as far as a program can tell."""

from __future__ import annotations

import argparse
import inspect
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml

from dask_mohpo import SearchSpace, SeedContext, _wandb_sweep, hypervolume, run_study
from dask_mohpo.agents import ALGORITHMS, load_algorithm
from dask_mohpo.cli import _parser
from dask_mohpo.environments import REGISTRY, RegisteredEnvironment, describe, known_front
from dask_mohpo.errors import SpaceError
from dask_mohpo.specs import read_spec
from test_layers import FLOORS

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in PAGES}

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def blocks(page: str, kind: str) -> list[str]:
    """The fenced blocks of one kind, without their indentation."""
    found = []
    for indent, given, text in _FENCE.findall(TEXTS[page]):
        if given == kind:
            found.append("".join(line.removeprefix(indent) for line in text.splitlines(True)))
    return found


def every_block(kind: str) -> list[Any]:
    return [
        pytest.param(page, text, id=f"{page}-{number}")
        for page in TEXTS
        for number, text in enumerate(blocks(page, kind))
    ]


def prose(page: str) -> str:
    """The text without its fenced blocks."""
    return _FENCE.sub("", TEXTS[page])


def table(page: str, first: str) -> list[list[str]]:
    """The rows, without the heading, of the table whose first column has this heading."""
    lines = TEXTS[page].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def code(cell: str) -> list[str]:
    """What stands in backticks, of one or two each."""
    return [text.strip() for _, text in re.findall(r"(`+)(.*?)\1", cell)]


# --- links ----------------------------------------------------------------------------------------


def links() -> Iterator[Any]:
    for path in PAGES:
        for target in re.findall(r"\]\(\s*([^)\s]+)\s*\)", TEXTS[path.name]):
            if "://" not in target:
                yield pytest.param(path, target, id=f"{path.name}-{target}")


@pytest.mark.parametrize(("path", "target"), list(links()))
def test_relative_links_resolve(path: Path, target: str) -> None:
    file, _, anchor = target.partition("#")
    place = path.parent / file if file else path
    assert place.exists()
    if anchor:
        headings = re.findall(r"^#+ (.*)$", place.read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w\- ]", "", h).lower().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", TEXTS)
def test_scripts_that_a_page_runs_are_there(page: str) -> None:
    for script in re.findall(r"python ((?:benchmarks|examples)/\S+\.py)", TEXTS[page]):
        assert (ROOT / script).is_file()


# --- Python ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "text"), every_block("python"))
def test_python_compiles(page: str, text: str) -> None:
    compile(text, page, "exec")


@pytest.mark.parametrize("text", blocks("search_spaces.md", "python"))
def test_spaces_in_python(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(text, names)

    config = suggest(SearchSpace.load(names["space"]))

    load_algorithm("envelope").config.from_mapping(config)


@pytest.mark.parametrize("page", TEXTS)
def test_arguments_of_run_study_that_a_page_names(page: str) -> None:
    named = set(re.findall(r"`(?:run_study\((?:\.\.\., )?)?([a-z_]+)=", prose(page)))
    assert named <= set(inspect.signature(run_study).parameters)


@pytest.mark.parametrize("name", ["seed_retries", "max_failures"])
def test_defaults_that_the_readme_gives(name: str) -> None:
    [given] = re.findall(rf"`{name}=(\w+)`", TEXTS["README.md"])
    assert str(inspect.signature(run_study).parameters[name].default) == given


@pytest.mark.parametrize("page", TEXTS)
def test_what_a_page_says_that_the_context_has(page: str) -> None:
    given = set(re.findall(r"^    (\w+) : ", inspect.getdoc(SeedContext) or "", re.MULTILINE))
    given |= set(re.findall(r"^(\w+) : ", inspect.getdoc(SeedContext) or "", re.MULTILINE))
    given |= {name for name in vars(SeedContext) if not name.startswith("_")}
    assert set(re.findall(r"\bcontext\.([a-z_]+)", TEXTS[page])) <= given


# --- commands -------------------------------------------------------------------------------------


def commands() -> Iterator[Any]:
    for page in TEXTS:
        for text in blocks(page, "sh"):
            for line in text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["exec"]:
                    del words[0]
                if words[:1] == ["dask-mohpo"]:
                    yield pytest.param(words[1:], id=f"{page}: {' '.join(words)}")
    for line in re.findall(r"`(dask-mohpo [^`]*)`", prose("README.md")):
        yield pytest.param(shlex.split(line)[1:], id=f"README.md: {line}")


@pytest.mark.parametrize("words", list(commands()))
def test_commands_parse(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if ">" in words:
        words = words[: words.index(">")]
    try:
        _parser().parse_args(words)
    except SystemExit as left:
        assert left.code == 0, capsys.readouterr().err  # --help leaves with 0


def test_there_are_commands_to_parse() -> None:
    assert len(list(commands())) > 5


def own_flags() -> set[str]:
    parsers = [_parser()]
    for action in parsers[0]._actions:
        if isinstance(action, argparse._SubParsersAction):
            parsers += action.choices.values()
    return {
        flag for parser in parsers for action in parser._actions for flag in action.option_strings
    }


def test_flags_that_the_readme_names() -> None:
    from distributed.cli.dask_worker import main as dask_worker

    others = {flag for option in dask_worker.params for flag in option.opts}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", TEXTS["README.md"]))
    assert "--train-hyperparams" in named
    assert named <= own_flags() | others


# --- YAML -----------------------------------------------------------------------------------------


def suggest(space: SearchSpace) -> dict[str, Any]:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    return space.suggest(study.ask())


@pytest.mark.parametrize(("page", "text"), every_block("yaml"))
def test_yaml_is_a_search_space_or_a_cluster_spec(page: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(text, encoding="utf-8")
    if "kind" in yaml.safe_load(text):
        read_spec(file)
        return
    space = SearchSpace.load(file)

    assert suggest(space).keys() == set(space.names or ())
    if page == "README.md":
        space.check_names(load_algorithm("envelope").config.names(), "envelope")


def test_search_spaces_has_both_forms_of_yaml() -> None:
    own, sweep = (yaml.safe_load(text) for text in blocks("search_spaces.md", "yaml"))
    assert "parameters" not in own
    used = {entry.get("distribution") for entry in sweep["parameters"].values()}
    assert {"log_uniform", "log_uniform_values", "q_uniform", "normal"} <= used


def test_every_distribution_of_a_sweep_is_listed() -> None:
    rows = table("search_spaces.md", "distribution")
    listed = {code(name)[0]: set(code(keys)) for name, keys, _ in rows}
    known = {name: set(keys) for name, keys in _wandb_sweep._DISTRIBUTIONS.items()}
    known["categorical"].remove("probabilities")  # said in the last column
    assert listed == known


def test_every_ignored_key_of_a_sweep_is_listed() -> None:
    [listed] = re.findall(r"these keys are ignored.*?:\n(.*?)\. ", TEXTS["search_spaces.md"], re.S)
    assert code(listed) == sorted(_wandb_sweep._IGNORED)


def test_what_is_said_to_be_refused_of_a_sweep() -> None:
    [listed] = re.findall(
        r"read as `categorical`\. (.*?) are\s+refused", TEXTS["search_spaces.md"], re.S
    )
    *distributions, nested = code(listed)
    assert nested == "parameters:"
    entries: list[dict[str, Any]] = [{"distribution": name} for name in distributions]
    for entry in [*entries, {"parameters": {"y": {"value": 1}}}]:
        with pytest.raises(SpaceError):
            SearchSpace.load({"parameters": {"x": entry}})


@pytest.mark.parametrize(("given", "said"), table("search_spaces.md", "in `space.yaml`"))
def test_errors_of_spaces(given: str, said: str, tmp_path: Path) -> None:
    [text], [message] = code(given), code(said) if not said.startswith("``") else [said.strip("` ")]
    file = tmp_path / "space.yaml"
    file.write_text(text, encoding="utf-8")

    with pytest.raises(SpaceError) as caught:
        SearchSpace.load(file, source="space.yaml")

    assert str(caught.value).rstrip("`") == message.rstrip("`")


# --- tables of what there is ----------------------------------------------------------------------

ENVIRONMENTS = {code(row[0])[0]: row[1:] for row in table("environments.md", "id")}


def test_the_table_has_the_environments_of_the_registry() -> None:
    assert list(ENVIRONMENTS) == list(REGISTRY)


def expected_cells(env_id: str, known: RegisteredEnvironment) -> list[str]:
    """Reference point, discount, episodes and known front, as the table has them."""
    front = known_front(env_id, known.eval_gamma)
    return [
        f"({', '.join(f'{number:.0f}' for number in known.ref_point)})",
        f"{known.eval_gamma:g}",
        "1" if known.deterministic else "5",
        "–" if front is None else f"{hypervolume(front, known.ref_point):.2f}",
    ]


@pytest.mark.parametrize("env_id", REGISTRY)
def test_the_table_of_environments(env_id: str) -> None:
    objectives, ref_point, gamma, episodes, source, front = ENVIRONMENTS[env_id]

    assert [ref_point, gamma, episodes, front] == expected_cells(env_id, REGISTRY[env_id])
    number = 6 if objectives == "six nutrients" else len(objectives.split(", "))
    assert number == describe(env_id).num_objectives
    legend = {"IPRO", "MORL/D", "example", "bounds", "as the concave map", "as minecart-v0"}
    assert set(source.split(", ")) <= legend


def test_the_readme_has_the_algorithms() -> None:
    rows = table("README.md", "name")
    assert [code(row[0]) for row in rows] == [[name] for name in ALGORITHMS]


def test_the_readme_describes_the_demo() -> None:
    demo = yaml.safe_load((ROOT / "examples" / "demo.yaml").read_text())
    readme = TEXTS["README.md"]
    assert f"{demo['n_trials']} trials × {demo['num_seeds']} seeds of Envelope Q-learning" in readme
    assert f"study        {demo['study_name']}: {demo['algo']} on {demo['env_id']}" in readme
    assert f"trials       {demo['n_trials']} complete" in readme


def test_every_module_has_its_promise() -> None:
    listed = [code(row[0])[0] for row in table("architecture.md", "module")]
    top = {floor for floor in FLOORS if floor and "." not in floor and not floor.startswith("_")}
    assert set(listed) == top
    assert len(listed) == len(top)


def test_every_private_module_is_named() -> None:
    private = {floor for floor in FLOORS if floor.startswith("_")}
    assert private <= set(code(prose("architecture.md")))


def test_the_diagram_of_floors() -> None:
    [diagram] = (text for text in blocks("architecture.md", "text") if "the command" in text)
    rows = [re.split(r" {3,}", line)[0].split() for line in diagram.splitlines()]
    places = [[FLOORS.index(name.rstrip("/")) for name in row] for row in rows]

    for above, below in itertools.pairwise(places):
        assert min(above) > max(below)
    assert {name.rstrip("/") for row in rows for name in row} == {
        code(row[0])[0] for row in table("architecture.md", "module")
    }
