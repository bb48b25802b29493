-- Change how many there are to be. ARGV: Runners, Backup Runners. Returns 0 if there never was such a cluster.

if call('EXISTS', HEAD) == 0 then return 0 end
call('HSET', HEAD, 'runner', ARGV[3], 'backup', ARGV[4])
tell('scaled', '', nil, nil, 'runner ' .. ARGV[3] .. ', backup ' .. ARGV[4])
return 1
