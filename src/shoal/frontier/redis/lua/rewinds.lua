-- The rewinds that clients of the run noticed, oldest first, as recover.lua packs them.

return call('LRANGE', own.key .. ':rewinds', 0, -1)
