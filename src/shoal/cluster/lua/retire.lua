-- Give the own slot back. ARGV: name, session.

local name = ARGV[3]
if not lives(name, ARGV[4]) then return 0 end
local index, epoch = vacate(name, '')
if not index then return 0 end
tell('retired', name, index, epoch)
return 1
