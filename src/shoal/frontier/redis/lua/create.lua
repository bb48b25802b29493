-- Create a run. ARGV: the format of the store, run_id, then its other fields and values. Returns 0 if it exists.

if call('HEXISTS', PREFIX .. 'runs', ARGV[6]) == 1 then return 0 end
-- Redis stores a small sorted set as a list, which is slow to search. One long member makes it a tree from the start.
call('ZADD', LEASES, 'inf', string.rep('\0', 65))
local number = call('HINCRBY', PREFIX .. 'store', 'run', 1)
call('HSET', PREFIX .. 'store', 'format', ARGV[5])
call('HSET', PREFIX .. 'runs', ARGV[6], number)
call('HSET', PREFIX .. 'run:' .. number, 'run_id', ARGV[6], unpack(arguments_from(7)))
return 1
