"""The workers: how they join and leave, how they are, who they turned out to be, and orders to all of them."""
