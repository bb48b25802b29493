"""How a page is fetched: request in, response out.

The room has the HTTP clients, the browser, Tor, sessions, and the layers around them. It imports values, `config` and
`ports`. Start with `layers/__init__.py`, then read `direct.py`, the client that fetches most pages.
"""
