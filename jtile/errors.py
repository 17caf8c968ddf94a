"""The typed errors of jtile, for `except jt.errors.KernelTypeError`."""

from jtile._errors import CacheError as CacheError
from jtile._errors import CacheWarning as CacheWarning
from jtile._errors import CompileError as CompileError
from jtile._errors import ContextError as ContextError
from jtile._errors import DeadlockError as DeadlockError
from jtile._errors import DefectWarning as DefectWarning
from jtile._errors import EngineError as EngineError
from jtile._errors import InterpreterError as InterpreterError
from jtile._errors import JtileError as JtileError
from jtile._errors import KernelAssertionError as KernelAssertionError
from jtile._errors import KernelSyntaxError as KernelSyntaxError
from jtile._errors import KernelTypeError as KernelTypeError
from jtile._errors import KernelValueError as KernelValueError
from jtile._errors import ModelError as ModelError
from jtile._errors import OutOfBoundsError as OutOfBoundsError
from jtile._errors import ParseError as ParseError
from jtile._errors import PromptError as PromptError
from jtile._errors import ProtocolError as ProtocolError
from jtile._errors import QueueFullError as QueueFullError
from jtile._errors import RaceError as RaceError
from jtile._errors import SharedRaceError as SharedRaceError
from jtile._errors import TransformError as TransformError
from jtile._errors import UninitializedReadError as UninitializedReadError
from jtile._errors import UnsupportedError as UnsupportedError
from jtile._errors import VerificationError as VerificationError
