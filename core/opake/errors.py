"""Every error and warning that opake raises on purpose, under one root.

An error says what is wrong, where, shows both values, names the way out, and is raised before any state changes. A
wrong argument is also a ValueError or TypeError and a missing thing also an ImportError or LookupError, so that callers
who have never heard of opake catch what they expect. The kernels are a package of their own and raise the built-in
classes.

OpakeError
├── UnknownFamily (LookupError)             no plugin claims this model_type
├── FamilyConflict                          two distributions claim one model_type
├── FamilyBlocked                           OPAKE_BLOCK_FAMILIES switches it off
├── FamilyImportError (ImportError)         the plugin's module does not import
├── FamilyInvalid (ValueError)              the plugin's hooks, or what they return, break the contract
├── UnknownOption (TypeError)               a keyword that no patch knows
├── OptionTypeError (TypeError)             a known keyword with a value of the wrong type
├── PatchError (RuntimeError)               a patch cannot be put on
│   ├── RestoreConflict                     somebody else's change lies on top of ours
│   ├── SeveralAdapters (AssertionError)    one active adapter is needed, and there are more
│   └── ProjectionsNotFound (AssertionError)  an attention without projections of a known kind
├── UnsupportedModel (TypeError)            not a model that opake can patch
│   └── UnsupportedModelType (NotImplementedError)  a model that is built in an unknown way
├── InputError (ValueError)                 a tensor, shape or argument that the function cannot take
├── EngineUnavailable (NotImplementedError) the engine asked for cannot serve this target
├── MissingDependency (ImportError)         an optional package or device is needed and absent
└── AttentionClassNotFound (ValueError, ImportError)  a model without the attention class that was asked for

OpakeWarning (UserWarning)
├── NotFusedWarning                         a layer that was to be fused keeps its own forward
├── GenericFamilyWarning                    an unregistered model_type gets the generic patches only
└── ChangedInterfaceWarning                 an installed library no longer has an interface that patching stands on
"""

from __future__ import annotations


class OpakeError(Exception):
    """Root of every error that opake raises on purpose."""


class UnknownFamily(OpakeError, LookupError):
    """No plugin claims this model_type."""


class FamilyConflict(OpakeError):
    """Two distributions claim one model_type."""


class FamilyBlocked(OpakeError):
    """The environment variable OPAKE_BLOCK_FAMILIES switches this family off."""


class FamilyImportError(OpakeError, ImportError):
    """The module of a family plugin, or of an extension to it, does not import."""


class FamilyInvalid(OpakeError, ValueError):
    """A plugin's hooks, or what they return, break the contract of `opake.hookspecs`."""


class UnknownOption(OpakeError, TypeError):
    """A keyword that no patch knows."""


class OptionTypeError(OpakeError, TypeError):
    """A known keyword with a value of the wrong type."""


class PatchError(OpakeError, RuntimeError):
    """A patch cannot be put on."""


class RestoreConflict(PatchError):
    """A patch cannot be taken off, because somebody else's change lies on top of it."""


class SeveralAdapters(PatchError, AssertionError):
    """One active adapter is needed, and there are more."""


class ProjectionsNotFound(PatchError, AssertionError):
    """An attention module without projections of a known kind."""


class UnsupportedModel(OpakeError, TypeError):
    """Not a model that opake can patch."""


class UnsupportedModelType(UnsupportedModel, NotImplementedError):
    """A model that is built in a way for which there is no patch."""


class InputError(OpakeError, ValueError):
    """A tensor, shape or argument that the function cannot take."""


class EngineUnavailable(OpakeError, NotImplementedError):
    """The engine or capture that was asked for cannot serve this target."""


class MissingDependency(OpakeError, ImportError):
    """An optional package or device is needed and absent."""


class AttentionClassNotFound(OpakeError, ValueError, ImportError):
    """The model has no attention class of the kind that was asked for."""


class OpakeWarning(UserWarning):
    """Root of every warning that opake gives."""


class NotFusedWarning(OpakeWarning):
    """A layer that was to be fused keeps its own forward."""


class GenericFamilyWarning(OpakeWarning):
    """An unregistered model_type gets the generic patches only."""


class ChangedInterfaceWarning(OpakeWarning):
    """An installed library no longer has an interface that patching stands on."""
