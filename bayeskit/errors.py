"""All exceptions and warnings of bayeskit.

All exceptions derive from :class:`BayeskitError`, all warnings from
:class:`BayeskitWarning`. Each message names the place (site, file and line,
dimension or chain) and the remedy; below it, a traceback names the page of the
documentation that explains it.
"""

from typing import ClassVar

from bayeskit._core.documentation import place_of_page

__all__ = [
    "AccuracyWarning",
    "AlignmentError",
    "BayeskitError",
    "BayeskitWarning",
    "BudgetError",
    "CheckpointError",
    "CheckpointWarning",
    "CoherenceError",
    "CompilationWarning",
    "ConstantsWarning",
    "ConversionWarning",
    "DataError",
    "DataWarning",
    "DrawsError",
    "GuideError",
    "ImproperPosteriorError",
    "InitializationError",
    "InitializationWarning",
    "JitterWarning",
    "KernelError",
    "LossError",
    "MissingPackageError",
    "ModelError",
    "OutputError",
    "PrecisionWarning",
    "SamplingWarning",
    "SettingsError",
    "ShapeError",
    "SlowModelWarning",
    "TreeError",
    "UnknownNameError",
    "UnsupportedSiteError",
    "WorkerError",
]


class BayeskitError(Exception):
    """Base class of every exception bayeskit raises on purpose.

    Attributes
    ----------
    page : str
        Page of the documentation on the error, shown as a note below the message.

    Examples
    --------
    >>> from bayeskit.errors import TreeError
    >>> TreeError("tree.nwk, line 1: a bracket is missing").__notes__
    ['See docs/how_to/own_alignment.md']
    """

    page: ClassVar[str] = "how_to/errors"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.add_note(f"See {place_of_page(self.page)}")


class ModelError(BayeskitError, ValueError):
    """A model cannot be turned into a :class:`~bayeskit.Target`."""

    page = "how_to/own_model"


class UnsupportedSiteError(ModelError):
    """A latent site cannot enter an unconstrained vector (discrete and unmarked, or without bijection)."""


class GuideError(ModelError):
    """Guide and model do not fit together: a site is missing, left over, or of another support."""

    page = "how_to/own_network"


class ImproperPosteriorError(ModelError):
    """A posterior is improper: its unnormalised density has no finite integral."""

    page = "how_to/own_loss"


class CoherenceError(BayeskitError, ValueError):
    """Sequential updating is not possible, because the result would depend on the order of the data."""

    page = "how_to/own_loss"


class LossError(BayeskitError, FloatingPointError):
    """The loss of a training step is not finite; the message names the step and the site."""

    page = "how_to/own_network"


class KernelError(BayeskitError, ValueError):
    """A kernel matrix is not positive definite, even with the largest jitter allowed."""

    page = "how_to/own_network"


class DataError(BayeskitError, ValueError):
    """Data contain missing or non-finite values, or have the wrong shape."""


class ShapeError(BayeskitError, ValueError):
    """A tensor does not have the shape that its docstring promises."""


class InitializationError(BayeskitError, RuntimeError):
    """No finite starting point was found, or the given starting point has zero density."""

    page = "how_to/own_model"


class SettingsError(BayeskitError, ValueError):
    """A setting lies outside its domain."""


class BudgetError(BayeskitError, RuntimeError):
    """A time budget ended before there was a result to return."""

    page = "how_to/checkpoints"


class DrawsError(BayeskitError, ValueError):
    """Draws do not fit the target or the estimator they were given to."""

    page = "concepts/trust"


class CheckpointError(BayeskitError, RuntimeError):
    """A checkpoint or another file of bayeskit is damaged, of another version, or belongs to another run."""

    page = "how_to/checkpoints"


class WorkerError(BayeskitError, RuntimeError):
    """Processes that work on tasks died, or the cluster they belong to is gone."""

    page = "how_to/dask"


class MissingPackageError(BayeskitError, ImportError):
    """A package that an optional part of bayeskit needs is not installed; the message names the command."""


class OutputError(BayeskitError, OSError):
    """An output file or directory cannot be written."""


class AlignmentError(DataError):
    """An alignment file or matrix is malformed; the message names file, line or taxon."""

    page = "how_to/own_alignment"


class TreeError(DataError):
    """A tree is malformed, not binary, or does not fit its alignment."""

    page = "how_to/own_alignment"


class UnknownNameError(BayeskitError, KeyError):
    """A registry has no entry of that name; the message suggests the nearest one."""

    def __str__(self) -> str:
        """Return the message without the quotes that ``KeyError`` adds."""
        return str(self.args[0]) if self.args else ""


class BayeskitWarning(UserWarning):
    """Base class of every warning bayeskit issues."""


class SlowModelWarning(BayeskitWarning):
    """A model cannot be batched and is evaluated in a loop."""


class CompilationWarning(BayeskitWarning):
    """A density or network could not be compiled and runs as it was written, or its code is kept elsewhere."""


class InitializationWarning(BayeskitWarning):
    """One or more chains start at a point without finite density and stay there."""


class SamplingWarning(BayeskitWarning):
    """Draws show a sampling problem such as divergences or chains that disagree."""


class CheckpointWarning(BayeskitWarning):
    """A checkpoint could not be written, for want of space or memory; the run goes on without it."""


class AccuracyWarning(BayeskitWarning):
    """A number may be off by more than rounding; the message says by how much and what helps."""


class PrecisionWarning(BayeskitWarning):
    """A model is computed in single precision, because its data are."""


class JitterWarning(BayeskitWarning):
    """Jitter was added to the diagonal of a kernel matrix that was not positive definite because of rounding."""


class ConversionWarning(BayeskitWarning):
    """Input was converted to the form a method needs."""


class DataWarning(BayeskitWarning):
    """Data are valid but say less than they seem to, such as identical sequences or columns of gaps."""


class ConstantsWarning(BayeskitWarning):
    """A constant of the density was dropped, or a prior does not follow its density; the evidence is wrong by it."""
