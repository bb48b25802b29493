-- Bring a run from one state to another. ARGV: the state it has to be in, the new one. Returns 0 if it is in another.

if own.state ~= ARGV[5] then return 0 end
call('HSET', own.key, 'state', ARGV[6])
return 1
