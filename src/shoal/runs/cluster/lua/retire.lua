-- Release the member's slot. ARGV: name, session, epoch: a late call must not release a slot that was won since.

local name = ARGV[3]
if not is_member(name, ARGV[4]) then return 0 end
local _, held_under = slot_of(name)
if held_under ~= tonumber(ARGV[5]) then return 0 end
local index, epoch = vacate(name, '')
record_event('retired', name, index, epoch)
return 1
