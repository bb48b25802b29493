-- Change the wanted numbers. ARGV: Runners, Backup Runners. Returns 0 if there is no such cluster.

if call('EXISTS', HEAD) == 0 then return 0 end
call('HSET', HEAD, 'runner', ARGV[3], 'backup', ARGV[4])
record_event('scaled', '', nil, nil, 'runner ' .. ARGV[3] .. ', backup ' .. ARGV[4])
return 1
