"""LOCKS in Transformers, to measure quality; it is no faster than dense attention there, and is not meant to be.

    import pagelocks.hf
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="locks")
    session = pagelocks.hf.attach(model, LocksConfig(budget=256, dense_below=0), selector="locks")
    model.generate(...)
    print(session.statistics())

A forward pass over several tokens, a prompt or a part of one, is dense; one over a single token is sparse.  So assisted
generation, prompt lookup and `use_cache=False` are mostly or wholly dense, and the counts show it.
"""

from .attention import register
from .session import LayerStatistics, Session, SparseStep, attach, detach, distinct_pages, use

register()

__all__ = ["LayerStatistics", "Session", "SparseStep", "attach", "detach", "distinct_pages", "register", "use"]
