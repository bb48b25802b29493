-- Counters of a run. Returns them, the number of rewinds, the number of staged links, and 1 if seeding is finished.

local answer = {}
for i = 1, 8 do answer[i] = own[COUNTERS[i]] end
local seed = call('HGET', own.key .. ':role', 'seed')
answer[9] = own.rewinds
answer[10] = own.incoming
answer[11] = seed and read('B', seed, 17) or 0
return answer
