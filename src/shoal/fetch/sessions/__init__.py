"""Sessions: the cookies and logins of a run, kept in its store and shared by all its processes."""
