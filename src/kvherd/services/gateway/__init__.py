"""The gateway: `gateway.py` puts the rooms together.

`relay` takes requests in and passes answers out; `turns` does what is done for each; `reading`, `following`, `fleet`
and `waiting` are what it asks; `doors` are for operators.
"""
