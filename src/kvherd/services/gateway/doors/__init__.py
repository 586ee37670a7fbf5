"""For operators: what they ask and order, over HTTP and gRPC."""
