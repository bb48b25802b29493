-- Counters of a run. Returns them, and 1 if seeding is finished.

local answer, seed, finished = {}, call('HGET', own.key .. ':role', SEED_ROLE), 0
if seed then finished = select(3, read(ROLE, seed)) end
for i, name in ipairs(STATS) do answer[i] = own[name] end
answer[#answer + 1] = finished
return answer
