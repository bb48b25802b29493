-- A page of dead requests. ARGV: cursor, about how many. Returns the next cursor ('0' at the end), and fingerprints.

local found = {}
local cursor = scan(own.key .. ':dead', ARGV[5], ARGV[6], function(fingerprint) found[#found + 1] = fingerprint end)
return {cursor, found}
