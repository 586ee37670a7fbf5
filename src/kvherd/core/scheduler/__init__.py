"""The embedded engine's scheduler: what happened goes in, what to do and what to say comes out.

    requests → queue → batch of one step → tokens out        scheduler.py · admission.py · endings.py
    blocks of the pool ↔ prefix tree → KV events              kv_memory.py · prefix_tree.py · hashes.py
    flushes that wait for an idle moment                      flushes.py

Nothing here waits, reads a clock or runs a model.
"""
