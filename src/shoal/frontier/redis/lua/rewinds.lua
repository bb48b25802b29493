-- Rewinds that clients of the run noticed, oldest first, packed as in recover.lua.

return call('LRANGE', own.key .. ':rewinds', 0, -1)
