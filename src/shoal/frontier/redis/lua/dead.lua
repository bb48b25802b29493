-- Some of the dead requests. ARGV: where to go on, about how many. Returns where to go on ('0' at the end), and their
-- fingerprints.

local page, found = call('HSCAN', own.key .. ':dead', ARGV[5], 'COUNT', ARGV[6]), {}
for i = 1, #page[2], 2 do found[#found + 1] = page[2][i] end
return {page[1], found}
