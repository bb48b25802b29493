-- Give the own slot back. ARGV: name, session, the epoch: one that comes late must not end what was won since.

local name = ARGV[3]
if not lives(name, ARGV[4]) then return 0 end
local _, held_under = slot_of(name)
if held_under ~= tonumber(ARGV[5]) then return 0 end
local index, epoch = vacate(name, '')
tell('retired', name, index, epoch)
return 1
