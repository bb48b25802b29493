-- Hold a slot. ARGV: name, session, index of the slot. Returns the epoch, 0 if it is not to be had, or nothing if the
-- member was lost.

local name, index = ARGV[3], tonumber(ARGV[5])
if not lives(name, ARGV[4]) then return false end
local own, held_under = slot_of(name)
if own then return own == index and held_under or 0 end
local last, runner = unpack(call('HMGET', HEAD, 'epoch', 'runner'))
if index >= (tonumber(runner) or 0) then return 0 end
local slot = all_slots()[index]
if slot and slot.holder ~= '' then return 0 end

-- The time, if that is more: a server that has lost its data must not give an epoch again.
local epoch = math.max((tonumber(last) or 0) + 1, microseconds)
call('HSET', HEAD, 'epoch', epoch)
save_slot(index, name, epoch, '')
local lost = slot and slot.lost or ''
tell(lost == '' and 'elected' or 'took over', name, index, epoch, lost)
return epoch
