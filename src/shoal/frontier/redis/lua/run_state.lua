-- The state of a run, without all that it was given. ARGV: run_id. Returns false if there is none.

local number = call('HGET', PREFIX .. 'runs', ARGV[5])
return number and call('HGET', PREFIX .. 'run:' .. number, 'state')
