"""The search for the fastest plan that fits, for a run and for ``lightning-holmes plan`` alike.

candidates.py says what is tried, balance.py assigns the layers, planner.py compares by simulation, preference.py decides
between what is nearly as fast, refine.py moves single layers of the winner, and shard_search.py holds parameters in shards against
whole ones.

    result = search(cost_model, SearchSpace(tensor=(1, 2, 4, 8)))
    result.best.run, result.best.partition, result.best.step_s
"""

from lightning_holmes.plan.search.candidates import SearchSpace
from lightning_holmes.plan.search.planner import SearchResult, search
from lightning_holmes.plan.search.preference import Preference
from lightning_holmes.plan.search.shard_search import search_with_sharding

__all__ = ["Preference", "SearchResult", "SearchSpace", "search", "search_with_sharding"]
