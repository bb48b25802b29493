-- Forget a worker that stops. ARGV: worker, epoch.

local epoch = read_worker(own, ARGV[5])
if not epoch or epoch > tonumber(ARGV[6]) then return 0 end
call('HDEL', own.key .. ':worker', ARGV[5])
call('ZREM', BEATS, beat_member(own, ARGV[5]))
return 1
