-- The ledger of a run. Returns its counters, how often it was found rewound, its links that are staged, and 1 when it is
-- seeded.

local answer = {}
for i = 1, 8 do answer[i] = own[COUNTERS[i]] end
local seed = call('HGET', own.key .. ':role', 'seed')
answer[9] = own.rewinds
answer[10] = own.incoming
answer[11] = seed and read('B', seed, 17) or 0
return answer
