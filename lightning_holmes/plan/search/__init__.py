"""The search for the fastest plan that fits, for a run and for ``lightning-holmes plan`` alike.

candidates.py lists the candidates, comparison.py assigns their layers and compares them by simulation, refine.py moves single layers of the
best plan, and shard_search.py compares sharded parameters with unsharded ones.

    result = search(cost_model, SearchSpace(tensor=(1, 2, 4, 8)))
    result.best.run, result.best.partition, result.best.step_s
"""

from lightning_holmes.plan.search.candidates import SearchSpace
from lightning_holmes.plan.search.comparison import SearchResult, search
from lightning_holmes.plan.search.shard_search import search_with_sharding

__all__ = ["SearchResult", "SearchSpace", "search", "search_with_sharding"]
