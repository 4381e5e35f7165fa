"""Virtual environments of the libraries that we are measured against, one for each of them.

    python benchmarks/venvs.py [NAME ...]

makes them in `benchmarks/.venvs`; a benchmark that needs one makes it by itself.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
HOME = HERE / ".venvs"
CONSTRAINTS = HERE.parent / "constraints.txt"
PACKAGES = {
    "morl-baselines": ["morl-baselines==1.3.0", "torch", "mo-gymnasium"],
    "optuna": ["optuna", "optuna-integration[dask]", "distributed"],
    "ray": ["ray[tune]", "optuna"],
    "smac": ["smac", "scikit-learn<1.8"],
    "syne-tune": ["syne-tune"],
}
"""Versions are those of `constraints.txt` where it names them, else the newest."""


def python_of(name: str) -> Path:
    """The interpreter of an environment, which is made where it is not there yet."""
    folder = HOME / name
    python, done = folder / "bin" / "python", folder / ".installed"
    if not done.exists():
        print(f"making the environment {name} ...", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "-c", str(CONSTRAINTS), *PACKAGES[name]], check=True)
        done.touch()
    return python


def versions_of(name: str, packages: list[str]) -> dict[str, str]:
    """Installed versions of packages in an environment."""
    code = "import sys, importlib.metadata as m; [print(p, m.version(p)) for p in sys.argv[1:]]"
    out = subprocess.run(
        [str(python_of(name)), "-c", code, *packages], check=True, capture_output=True, text=True
    ).stdout
    return dict(line.split() for line in out.splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PACKAGES)}; none: all")
    for name in parser.parse_args().names or PACKAGES:
        print(python_of(name))


if __name__ == "__main__":
    main()
