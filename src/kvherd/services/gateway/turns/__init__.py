"""A request of the data path from its first look at a worker to the end of its answer."""
