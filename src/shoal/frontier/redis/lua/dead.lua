-- A page of dead requests. ARGV: cursor, about how many. Returns the next cursor ('0' at the end), and fingerprints.

local page, found = call('HSCAN', own.key .. ':dead', ARGV[5], 'COUNT', ARGV[6]), {}
for i = 1, #page[2], 2 do found[#found + 1] = page[2][i] end
return {page[1], found}
