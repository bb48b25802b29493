-- Record a heartbeat. ARGV: worker, epoch, session, pid, machine. Returns the seconds until a late worker of any run is dead
-- if it stays silent; nothing if no other worker is late.

local worker, epoch, session = ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7])
local refusal = fenced(worker, epoch)
if refusal then return refusal end

hear(session)
call('HSET', own.key .. ':worker', worker, pack(WORKER, epoch, session, now, tonumber(ARGV[8]), #ARGV[9], ARGV[9]))
call('ZADD', BEATS, time_text(now + session * HEARD_GAP), beat_member(own, worker))
save_state()

local due = math.huge
for _, late in ipairs(late_workers()) do
  -- Until it is dead, heartbeats must come often enough for its session.
  due = math.min(due, late.dead_in, late.session * HEARD_GAP / 2)
end
return due < math.huge and time_text(due)
