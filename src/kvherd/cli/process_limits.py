"""What a process that serves asks of the system and of Python's collector, once its modules are there."""

import gc
import resource

_ENOUGH = 1_048_576
_YOUNG = 2_000
"""Objects between two looks at the youngest. Batches of KV events are tuples of many tokens: a look at 10,000 of them
stands still for 5 to 13 ms, and every lag with it.
"""


def prepare_process() -> None:
    """Allow this process as many connections as the system does, and let the garbage collector look less often: what
    was imported is never garbage, and a request leaves none that needs it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 50, 100)
