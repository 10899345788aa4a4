"""The same four steps on the GPU, and the plan they share: CUDA C++, compiled when an engine starts, and its wrappers.

The files in the core are the definition; every kernel is tested against them.
"""

from .caches import Caches
from .pipeline import Pipeline, Rows
from .shape import KernelShape

__all__ = ["Caches", "KernelShape", "Pipeline", "Rows"]
