"""How a page is fetched: request in, response out.

`direct` is the HTTP client, and `aiohttp_fetcher` serves proxies. `browser` renders pages in Chromium, and `tor`
sends them through Tor. `layers` are around the fetcher: robots.txt, delays, statuses, the cache, identities;
`sessions` has cookies and logins. This room may import `clients` and what is below it. Start with `direct`, then
`layers`.
"""
