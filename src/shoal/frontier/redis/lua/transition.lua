-- Change the state of a run. ARGV: the expected state, the new one, when the run ended or ''. Returns 0 if it is in another
-- state.

if own.state ~= ARGV[5] then return 0 end
call('HSET', own.key, 'state', ARGV[6], 'ended_at', ARGV[7])
return 1
