"""The data path: HTTP/1.1 in, HTTP/1.1 out, and as little as possible between."""
