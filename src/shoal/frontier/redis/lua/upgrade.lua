-- Raise the format of the store, unless workers of the old version may be at work: they would erase what they do not know.
-- ARGV: the old and the new format. Returns how many requests are leased and how many workers have a session; the format was
-- raised if both are 0.
--
-- Before format 7 each run had its own times of heartbeats. Those of its workers, which are dead, become times of the store.

local leased, live = call('ZCOUNT', LEASES, '(' .. time_text(now), '(inf'), 0
local runs_before, beats, sessions = {}, {}, {}
for _, number in ipairs(call('HVALS', PREFIX .. 'runs')) do
  local run = run_of(tonumber(number))
  runs_before[#runs_before + 1] = run
  local workers = run and call('HGETALL', run.key .. ':worker') or {}
  for i = 1, #workers, 2 do
    local _, session, beat_at = read(WORKER, workers[i + 1])
    if now < beat_at + session then live = live + 1 end
    beats[#beats + 1], beats[#beats + 2] = time_text(beat_at + session * HEARD_GAP), beat_member(run, workers[i])
    sessions[session_text(session)] = true
  end
end
if leased + live == 0 and call('HGET', PREFIX .. 'store', 'format') == ARGV[5] then
  many('ZADD', BEATS, beats)
  for session in pairs(sessions) do call('HSETNX', HEARD, session, time_text(now)) end
  for _, run in ipairs(runs_before) do
    call('UNLINK', run.key .. ':beat')
    call('HDEL', run.key, 'heard', 'heard_since')
  end
  call('HSET', PREFIX .. 'store', 'format', ARGV[6])
end
return {leased, live}
