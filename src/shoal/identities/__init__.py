"""Identities: proxies with the cookies and headers that belong to them, assigned to hosts and retired when blocked."""
