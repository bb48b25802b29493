-- Set the options of a run when a worker starts. ARGV: its weight. Returns 1 if they changed, so that its lanes have to move.

call('HSET', own.key, 'weight', ARGV[5])
local before = own.options
if before == OPTIONS then return 0 end
call('HSET', own.key, 'options', OPTIONS)
return before and 1 or 0
