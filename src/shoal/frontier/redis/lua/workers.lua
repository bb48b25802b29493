-- The workers of a run. Returns for each: name, record, seconds since its last heartbeat, number of its leases. Workers
-- without heartbeats, and slots of clusters, that hold leases have an empty record.

local counts, answer = {}, {}
for _, entry in ipairs(call('HVALS', own.key .. ':slot')) do
  local slot = sub(entry, (select(3, read(SLOT, entry))))
  counts[slot] = (counts[slot] or 0) + 1
end
local workers = call('HGETALL', own.key .. ':worker')
for i = 1, #workers, 2 do
  local _, _, beat_at = read(WORKER, workers[i + 1])
  local silent_for = string.format('%.3f', math.max(0, now - beat_at))
  answer[#answer + 1] = {workers[i], workers[i + 1], silent_for, counts[workers[i]] or 0}
  counts[workers[i]] = nil
end
for slot, count in pairs(counts) do answer[#answer + 1] = {slot, '', '0', count} end
return answer
