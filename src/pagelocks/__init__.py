"""Page-local compact key summaries (LOCKS): read a small part of a long KV cache at each decode step.

The names below are the core, which needs PyTorch alone.  `pagelocks.vllm` is the plugin for vLLM.
"""

from .attend import sparse_attention
from .config import LocksConfig
from .score import log_mass, page_share
from .select import select_pages
from .summary import PageSummary, summarize

__version__ = "0.1.0"
__all__ = [
    "LocksConfig",
    "PageSummary",
    "log_mass",
    "page_share",
    "select_pages",
    "sparse_attention",
    "summarize",
]
