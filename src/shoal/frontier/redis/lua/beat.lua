-- Record a heartbeat. ARGV: worker, epoch, session, pid, machine. Returns the seconds until another worker is dead if it
-- stays silent; nothing if there is no other worker.

local worker, epoch, session = ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7])
local refusal = fenced(worker, epoch)
if refusal then return refusal end

local heard, since = heard_times()
if now - heard > session * HEARD_GAP then since = now end
call('HSET', own.key, 'heard', string.format('%.6f', now), 'heard_since', string.format('%.6f', since))
call('HSET', own.key .. ':worker', worker, pack(WORKER, epoch, session, now, tonumber(ARGV[8]), #ARGV[9], ARGV[9]))
call('ZADD', own.key .. ':beat', string.format('%.6f', now + session), worker)
save_state()

for _, other in ipairs(call('ZRANGE', own.key .. ':beat', 0, 1)) do
  if other ~= worker then
    local _, its_session, beat_at = read_worker(other)
    return string.format('%.6f', math.max(0, math.max(beat_at, since) + its_session - now))
  end
end
return false
