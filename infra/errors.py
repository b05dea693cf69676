"""Errors a user can act on.

Every bad input ends in a `ReproError`: one sentence that names the thing, one that says what to do.
The command line prints it without a traceback (unless `--debug`) and exits with `exit_code`.
"""


class ReproError(Exception):
    """A problem the user can fix. `what` names the thing that is wrong, `remedy` says what to do."""

    exit_code = 2

    def __init__(self, what: str, remedy: str = ""):
        super().__init__(what)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}\n  -> {self.remedy}" if self.remedy else self.what


class RecipeError(ReproError):
    """An unknown field, a wrong type or an impossible combination in a recipe."""


class DataError(ReproError):
    """Documents, token files, index, order or mask are not what they should be."""


class IdentityError(ReproError):
    """A file, checkpoint or run directory is not the one its manifest describes."""


class LeaseError(ReproError):
    """Another live process owns this directory."""


class ParityError(ReproError):
    """Two implementations of the same weights disagree by more than rounding."""


class LaunchError(ReproError):
    """A launched job failed; the message carries its exit code and last log lines."""
