-- Take a slot. ARGV: name, session, index of the slot. Returns its epoch, 0 if it is not free, or nothing if the session
-- has ended.

local name, index = ARGV[3], tonumber(ARGV[5])
if not is_member(name, ARGV[4]) then return false end
local own, held_under = slot_of(name)
if own then return own == index and held_under or 0 end
local last, runner = unpack(call('HMGET', HEAD, 'epoch', 'runner'))
if index >= (tonumber(runner) or 0) then return 0 end
local slots, held = all_slots(), 0
for _, each in pairs(slots) do
  if each.holder ~= '' then held = held + 1 end
end
local slot = slots[index]
if held >= tonumber(runner) or (slot and slot.holder ~= '') then return 0 end -- after a scale down, too many may hold slots

-- At least the time: a server that has lost its data must not issue the same epoch again.
local epoch = math.max((tonumber(last) or 0) + 1, microseconds)
call('HSET', HEAD, 'epoch', epoch)
save_slot(index, name, epoch, '')
local lost = slot and slot.lost or ''
record_event(lost == '' and 'elected' or 'took over', name, index, epoch, lost)
return epoch
