"""The same four steps on the GPU, a kernel a file: CUDA C++ compiled when an engine starts, checked wrappers around it.

The files in the core are the definition; every kernel is tested against them.
"""

from .caches import Caches
from .pipeline import Pipeline, Rows
from .shape import KernelShape

__all__ = ["Caches", "KernelShape", "Pipeline", "Rows"]
