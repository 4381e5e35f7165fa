"""Every error that the library raises on purpose.

Each error keeps what it knows as attributes, so that a caller can act on it without parsing text.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

__all__ = [
    "ClusterError",
    "EnvironmentSpecError",
    "FrontError",
    "MohpoError",
    "NoWorkersError",
    "ResumeError",
    "SpaceError",
    "StudyFailedError",
    "StudyNotFoundError",
    "UnknownNameError",
    "UsageError",
]


class MohpoError(Exception):
    """Base of all errors of this library."""


class UsageError(MohpoError, ValueError):
    """An argument that cannot be used; the message says what is valid."""


class UnknownNameError(UsageError):
    """A name that is not among the valid ones.

    Attributes
    ----------
    kind : what the name was meant to be, for instance ``"hyperparameter of envelope"``.
    given : the name.
    valid : the valid names.
    closest : the valid name most like the given one, or None.
    """

    def __init__(self, kind: str, given: str, valid: Iterable[str], hint: str = "") -> None:
        self.kind = kind
        self.given = given
        self.valid = sorted(valid)
        matches = difflib.get_close_matches(str(given), self.valid, n=1, cutoff=0.5)
        self.closest = matches[0] if matches else None
        suggestion = f" Did you mean {self.closest!r}?" if self.closest else ""
        text = f"unknown {kind}: {given!r}.{suggestion} Valid: {', '.join(self.valid)}."
        super().__init__(f"{text} {hint}".rstrip())


class SpaceError(UsageError):
    """A mistake in a search space.

    Attributes
    ----------
    source : the file, or what else the space came from.
    parameter : the parameter at fault, or None where the mistake is not about one.
    given : what stood there.
    valid : what would have been right, in words.
    """

    def __init__(self, source: str, parameter: str | None, given: object, valid: str) -> None:
        self.source = source
        self.parameter = parameter
        self.given = given
        self.valid = valid
        where = f"{source}: parameter {parameter!r}" if parameter else source
        super().__init__(f"{where}: got {given!r}; valid: {valid}")


class EnvironmentSpecError(UsageError):
    """An environment that cannot be made or does not fit.

    Attributes
    ----------
    env_id : the environment's id.
    """

    def __init__(self, env_id: str, message: str) -> None:
        self.env_id = env_id
        super().__init__(f"{env_id}: {message}")


class FrontError(MohpoError, ValueError):
    """What a seed gave back is not a front: an array (n_points, n_objectives) of finite numbers."""


class ClusterError(MohpoError):
    """A cluster that cannot be opened or used."""


class NoWorkersError(ClusterError):
    """No worker offers the resources that a seed task needs.

    Attributes
    ----------
    request : resource name → amount that one seed task needs.
    offers : worker name → what it offers.
    """

    def __init__(
        self,
        request: Mapping[str, float],
        offers: Mapping[str, Mapping[str, float]],
        waited: float,
    ) -> None:
        self.request = dict(request)
        self.offers = {name: dict(offer) for name, offer in offers.items()}
        self.waited = waited
        wanted = ", ".join(f"{k}={v:g}" for k, v in self.request.items()) or "one free worker"
        if self.offers:
            shown = list(self.offers.items())[:5]
            lines = "; ".join(
                f"{name} offers {', '.join(f'{k}={v:g}' for k, v in offer.items()) or 'nothing'}"
                for name, offer in shown
            )
            more = len(self.offers) - len(shown)
            found = lines + (f"; and {more} more" if more > 0 else "")
        else:
            found = "there are no workers"
        after = f" after {waited:.0f} s" if waited >= 1 else ""
        super().__init__(
            f"no worker can take a seed task{after}: it needs {wanted}, but {found}. "
            "Start workers with `dask worker … --resources 'GPU=1'`, or pass resources= what they "
            "offer (resources={} for none)."
        )


class ResumeError(UsageError):
    """A study exists already, with other settings.

    Attributes
    ----------
    study_name : the study.
    differences : setting → (stored, given).
    """

    def __init__(self, study_name: str, differences: Mapping[str, tuple[object, object]]) -> None:
        self.study_name = study_name
        self.differences = dict(differences)
        lines = "\n".join(
            f"  {name}: stored {old!r}, now {new!r}" for name, (old, new) in differences.items()
        )
        super().__init__(
            f"study {study_name!r} exists with other settings, and its trials would not be "
            f"comparable:\n{lines}\nGive the stored settings to continue it, or another study_name "
            "to start a new one."
        )


class StudyFailedError(MohpoError):
    """The first trials of a study all failed, so the set-up is wrong.

    Attributes
    ----------
    study_name : the study.
    failures : how many trials failed.
    first_error : the first failed seed's error, with its traceback.
    """

    def __init__(self, study_name: str, failures: int, first_error: str) -> None:
        self.study_name = study_name
        self.failures = failures
        self.first_error = first_error
        super().__init__(
            f"study {study_name!r} stopped: its first {failures} trials all failed. "
            f"The first error was:\n{first_error}"
        )


class StudyNotFoundError(UsageError):
    """No study of that name where it was looked for.

    Attributes
    ----------
    study_name : the name.
    run_dir : the folder that was searched.
    found : the studies that are there.
    """

    def __init__(self, study_name: str, run_dir: str, found: Iterable[str]) -> None:
        self.study_name = study_name
        self.run_dir = run_dir
        self.found = sorted(found)
        there = ", ".join(self.found) if self.found else "none"
        super().__init__(
            f"no study {study_name!r} in {run_dir!r}; studies there: {there}. "
            "Pass --run-dir (run_dir=) if it lies elsewhere."
        )
