"""How a page is fetched: request in, response out.

`http_fetcher` is the HTTP client. `browser` renders pages in Chromium, and `tor` sends them through Tor. `layers` are
around the fetcher: robots.txt, delays, statuses, the cache, identities; `sessions` has cookies and logins. This room
may import `clients` and what is below it. Start with `http_fetcher`, then `layers`.
"""
