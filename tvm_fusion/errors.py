"""The few error types of tvm_fusion.

Every message is one sentence that says what is wrong and what to do. Refusals to fuse are not
errors: they are ``Verdict`` data in the plan. A wrong argument of a Python call raises
``ValueError`` or ``TypeError`` as usual.
"""


class FusionError(Exception):
    """Base of every error that the user can act upon."""


class InvalidModelError(FusionError):
    """The model file is missing, truncated, or not a legal model."""


class UnsupportedOperatorError(FusionError):
    """The model uses an operator that TVM (or this package) cannot import; the message names it."""


class UnknownNodeError(FusionError):
    """The model has no node of the name that was asked for; the message names similar ones."""


class TargetError(FusionError):
    """The target or its arch is unknown, or needs hardware that this machine lacks."""


class PlanError(FusionError):
    """A plan does not fit the model, or does not follow the schema."""


class LoweringError(FusionError):
    """A group could not be lowered to one kernel."""


class CompilerError(FusionError):
    """An external compiler (nvcc, ptxas) rejected generated code; the message carries its first error line."""


class DatabaseError(FusionError):
    """A work dir or a file of tuning records cannot be read or written, or holds no records."""


class TuningError(FusionError):
    """Tuning cannot go on: its processes do not start, or its records cannot be used."""
