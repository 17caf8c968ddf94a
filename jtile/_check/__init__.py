"""The checks behind `jtile.testing.check_kernel`."""

from jtile._check.checker import Checker as Checker
from jtile._check.checker import Settings as Settings
