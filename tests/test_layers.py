"""Imports run one way: a module imports only floors below its own."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dask_mohpo

ROOT = Path(dask_mohpo.__file__).parent
HEAVY = ("torch", "pymoo", "dask_jobqueue", "optuna", "distributed")
FLOORS = (
    "errors",
    "records",
    "fronts",
    "indicators",
    "environments",
    "_wandb_sweep",
    "_parameters",
    "space",
    "agents._contract",
    "agents._draws",
    "agents._weights",
    "agents._buffers",
    "agents._networks",
    "agents._envs",
    "agents._action_heads",
    "agents._episodes",
    "agents._envelope_learning",
    "agents.envelope",
    "agents.pcn",
    "agents",
    "devices",
    "evaluation",
    "training",
    "preload",
    "_queues",
    "_queue_specs",
    "specs",
    "jobs",
    "clusters",
    "journal",
    "ledger",
    "objectives",
    "slots",
    "tally",
    "_process",
    "waiting",
    "executor",
    "progress",
    "study",
    "report",
    "check",
    "cli",
    "__main__",
    "",
)
"""Ground first; the package itself, which offers the public names, is the roof.

A new module goes above all that it imports and below all that import it; a private part of a
module (`_name`) goes right below that module.
"""


def modules() -> list[str]:
    names = []
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return sorted(names)


def path_of(module: str) -> Path:
    folder = ROOT.joinpath(*module.split(".")) if module else ROOT
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


def imported(module: str) -> set[str]:
    """Modules of the package that a module imports, also inside of functions."""
    ours = set(modules())
    found: set[str] = set()
    for node in ast.walk(ast.parse(path_of(module).read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole.partition(".")[2] in ours else str(node.module))
    names = {name.partition(".")[2] for name in found if name.split(".")[0] == "dask_mohpo"}
    return names & ours


def floor(module: str) -> int:
    assert module in FLOORS, f"{module} has no floor: add it to FLOORS, above all that it imports"
    return FLOORS.index(module)


def test_every_module_has_its_floor() -> None:
    missing = set(modules()) - set(FLOORS)
    gone = set(FLOORS) - set(modules())
    assert not missing, f"add these to FLOORS, above all that they import: {sorted(missing)}"
    assert not gone, f"take these out of FLOORS: {sorted(gone)}"
    assert len(FLOORS) == len(set(FLOORS))


@pytest.mark.parametrize("module", modules())
def test_imports_run_downward(module: str) -> None:
    # The command may ask the package for a public name while it runs: nothing imports the command.
    allowed = {""} if module in ("cli", "__main__") else set()
    upward = {
        name
        for name in imported(module) - allowed
        if floor(name) >= floor(module) and name != module
    }
    assert not upward, f"{module or 'dask_mohpo'} imports {sorted(upward)}, which stand above it"


@pytest.mark.parametrize("module", ["dask_mohpo", "dask_mohpo.cli"])
def test_what_is_heavy_is_imported_when_it_is_needed(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"
