-- The state of a run, without its settings. ARGV: run_id. Returns false if there is no such run.

local number = call('HGET', PREFIX .. 'runs', ARGV[5])
return number and call('HGET', PREFIX .. 'run:' .. number, 'state')
