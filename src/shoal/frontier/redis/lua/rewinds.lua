-- The rewinds that clients of the run noticed, oldest first: when, and how many seconds were lost at most (NaN if that is
-- not known), packed.

return call('LRANGE', own.key .. ':rewinds', 0, -1)
