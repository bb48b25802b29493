-- Counters of a run. Returns them, how many items were deleted from the log, and 1 if seeding is finished.

local answer, seed, finished = {}, call('HGET', own.key .. ':role', SEED_ROLE), 0
if seed then finished = select(3, read(ROLE, seed)) end
for i, name in ipairs(STATS) do answer[i] = own[name] end
answer[#answer + 1] = tonumber(call('HGET', own.key, 'trimmed')) or 0
answer[#answer + 1] = finished
return answer
