-- Set the options of the run: a client takes part in it. ARGV: its weight. Returns 1 if they changed, so that its lanes have to
-- move.

call('HSET', own.key, 'weight', ARGV[5])
if own.options == OPTIONS then return 0 end
call('HSET', own.key, 'options', OPTIONS)
return call('EXISTS', own.key .. ':lane')
