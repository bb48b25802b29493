-- Prepended to the scripts about heartbeats. The workers of all runs watch each other.
--
-- `beat` of the store has each worker of each run, by the time from which it is late: its last heartbeat is half a session
-- old. Only late workers are looked at, and mostly there are none. `heard` has the time of the last heartbeat of any worker
-- (`at`), and for each length of a session the time since which heartbeats came without a gap that is long for it.

local BEATS, HEARD, MAX_LATE = PREFIX .. 'beat', PREFIX .. 'heard', 200

local function beat_member(run, worker) return run.packed_number .. worker end

local function time_text(time) return string.format('%.6f', time) end

local function session_text(session) return string.format('%.17g', session) end

-- The values of a worker of a run; nothing if it is not known.
local function read_worker(run, worker)
  local record = call('HGET', run.key .. ':worker', worker)
  if record then return read(WORKER, record) end
end

-- Record that a heartbeat has arrived, from a worker with this session.
local function hear(session)
  local heard, fields = call('HGETALL', HEARD), {'at', time_text(now)}
  local at, is_known = 0, false
  for i = 1, #heard, 2 do
    if heard[i] == 'at' then at = tonumber(heard[i + 1]) end
  end
  for i = 1, #heard, 2 do
    local length = tonumber(heard[i])
    is_known = is_known or length == session
    if length and now - at > length * HEARD_GAP then
      fields[#fields + 1], fields[#fields + 2] = heard[i], time_text(now)
    end
  end
  if not is_known then fields[#fields + 1], fields[#fields + 2] = session_text(session), time_text(now) end
  call('HSET', HEARD, unpack(fields))
end

-- The late workers of all runs, or only of `run`: the run of each, its name, epoch and session, and the seconds until it is
-- dead.
local function late_workers(only)
  local found, heard, entries = {}, {}, call('HGETALL', HEARD)
  for i = 1, #entries, 2 do heard[tonumber(entries[i]) or 'at'] = tonumber(entries[i + 1]) end
  for _, member in ipairs(call('ZRANGEBYSCORE', BEATS, '-inf', time_text(now), 'LIMIT', 0, MAX_LATE)) do
    local number, at = read('>I4', member)
    local run, worker = (not only or number == only.number) and run_of(number), sub(member, at)
    if run then
      local epoch, session, beat_at = read_worker(run, worker)
      if epoch and now - (heard.at or 0) <= session * HEARD_GAP then
        local silent_since = math.max(beat_at, heard[session] or now)
        found[#found + 1] = {
          run = run, name = worker, epoch = epoch, session = session, dead_in = math.max(0, silent_since + session - now),
        }
      end
    end
  end
  return found
end
