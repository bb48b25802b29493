-- Lanes. A lane is the queue of one run for one host.
--
-- Each run has three sorted sets of lanes: `open` lanes may be leased from, by their best request; `later` lanes wait, by
-- due time; `full` lanes have a host with too many requests in flight. Empty lanes are in none. A lane may be in `open`
-- although its host is not due: a lease checks the host again. It is never in `later` or `full` for too long.
--
-- When a request on a host ends, only the lane of the same run is moved, as there may be thousands of runs. Other runs
-- check their `full` lanes when they lease. To check only when something changed, ended requests are counted for the
-- store (`freed`) and for each run; the difference is what other runs freed. The score of a lane in `full` is that
-- difference at its last check. Lanes with the lowest score are checked first, so none starves.
--
-- The record of a lane has its front: its best requests, in order. All others come after the front. New ones with rank 0, as
-- most have, are in a list (`q:HOST`), in the order of their arrival; the rest is in a sorted set (`p:HOST`), which needs
-- four times the memory. So a call reads and writes the lanes of many hosts with one command each, and most hosts need
-- neither list nor set. After the front, a record has the place ('o', 'l' or 'f'), and '.' if there are no other requests,
-- '+' if there are some in the list, '#' if there may be some in both. The record of an empty lane is empty.

local QUEUED, OPEN_LANE = '>I8c16', '>I8c4' -- sequence and fingerprint, or host: sorted as strings
local LANE_HOST_AT = 9 -- in OPEN_LANE
local RANK_FIRST = '>d' -- then as QUEUED
local FRONTED, FRONTED_SIZE = RANK_FIRST .. 'I8c16', 32 -- a request in a front: its rank, then as in the sorted set
local ONLY = FRONTED .. 'c2' -- the record of a lane with one request
local SEQUENCE_AT, FRONT_LENGTH = 9, 8 -- where the sequence of the first request is; how many requests a front gets

local function list_key(run, number) return run.key .. ':q:' .. number end

local function set_key(run, number) return run.key .. ':p:' .. number end

-- Load the records of these lanes into `run.lanes`; '' for an empty one. A host that this script adds has none yet.
local function load_lanes(run, numbers)
  local lanes, missing, n = run.lanes, {}, 0
  for i = 1, #numbers do
    if not lanes[numbers[i]] and hosts[numbers[i]] ~= FRESH then
      n = n + 1
      missing[n] = numbers[i]
    end
  end
  local found = fetch(run.key .. ':lane', missing)
  for i = 1, n do lanes[missing[i]] = found[i] or '' end
end

-- Mark a lane that may have to move: if it is empty or full, or wherever it is if `stale`.
local function touch(run, number, stale)
  if not run.touched[number] then run.touched_list[#run.touched_list + 1] = number end
  run.touched[number] = stale or run.touched[number] or 'freed'
end

-- Count an ended lease of a run; nil: of a deleted run.
local function end_lease(run, host, contacted)
  local before = host.in_flight
  host.in_flight = math.max(0, before - 1)
  if contacted then host.ended_at = now end
  change(host)
  state.freed, state.is_changed = state.freed + 1, true
  if run then
    run.freed, run.is_changed = run.freed + 1, true
    local _, limit = policy(host.settings, hosts[ALL_HOSTS].settings, run, turns and turns.longest_of(host, run))
    if before >= limit then touch(run, host.number) end -- else its lane can only be in `full` because of other runs
  end
end

-- Add a ready request to the lane of its host at the end of the script.
local function enqueue(run, number, rank, sequence, fingerprint)
  local new = run.queued[number]
  if not new then
    run.queued[number] = {rank, sequence, fingerprint}
    if hosts[number] ~= FRESH then return touch(run, number) end
    run.touched_list[#run.touched_list + 1] = number -- nobody else touches it
    return
  end
  local n = #new
  new[n + 1], new[n + 2], new[n + 3] = rank, sequence, fingerprint
end

-- How many requests of other runs ended.
local function freed_by_others(run) return state.freed - run.freed end

local finish

do -- a function of Lua has at most 200 local variables: those of this block end with it
  -- Whether new requests are in order, and all come after the front.
  local function is_behind(front, new)
    local rank, sequence = -math.huge, 0
    if front ~= '' then rank, sequence = read(FRONTED, front, #front - FRONTED_SIZE + 1) end
    for i = 1, #new, 3 do
      if new[i] < rank or (new[i] == rank and new[i + 1] < sequence) then return false end
      rank, sequence = new[i], new[i + 1]
    end
    return true
  end

  -- The requests of a front and new ones, as rank, sequence, fingerprint, ... Those that belong into the front are sorted,
  -- and come first; the others follow as they were.
  local function merged(front, more, new)
    local entries, others, rank, sequence = {}, {}, math.huge, 0
    for at = 1, #front, FRONTED_SIZE do
      local fingerprint
      rank, sequence, fingerprint = read(FRONTED, front, at)
      entries[#entries + 1] = {rank, sequence, fingerprint}
    end
    for i = 1, #new, 3 do
      local is_before = new[i] < rank or (new[i] == rank and new[i + 1] < sequence)
      local part = (is_before or not more) and entries or others
      part[#part + 1] = {new[i], new[i + 1], new[i + 2]}
    end
    table.sort(entries, function(a, b) return a[1] < b[1] or (a[1] == b[1] and a[2] < b[2]) end)
    local flat = {}
    for _, part in ipairs({entries, others}) do
      for _, entry in ipairs(part) do
        flat[#flat + 1], flat[#flat + 2], flat[#flat + 3] = entry[1], entry[2], entry[3]
      end
    end
    return flat, math.min(#entries, FRONT_LENGTH)
  end

  -- Add new requests to the record of a lane. Returns it, and what enters the list and the sorted set, if anything.
  local function extend(run, record, new)
    if record == '' and #new == 3 then return pack(FRONTED, new[1], new[2], new[3]) .. 'o.' end -- many hosts have one page
    local front, more, parts = sub(record, 1, -3), sub(record, -1), {}
    local has_more, room = more == '+' or more == '#', 0
    if not is_behind(front, new) then
      new, room = merged(front, has_more, new)
      front = ''
    elseif not has_more then
      room = math.max(0, FRONT_LENGTH - #front / FRONTED_SIZE)
    end
    local list, set, n, m = {}, {}, 0, 0
    for i = 1, #new, 3 do
      local rank, sequence, fingerprint = new[i], new[i + 1], new[i + 2]
      if room > 0 then
        room = room - 1
        parts[#parts + 1] = pack(FRONTED, rank, sequence, fingerprint)
      elseif rank == 0 and sequence > run.old_sequence then
        n = n + 1
        list[n] = pack(FRONTED, rank, sequence, fingerprint)
      else
        set[m + 1], set[m + 2] = rank, pack(QUEUED, sequence, fingerprint)
        m = m + 2
      end
    end
    if m > 0 then more = '#' elseif not has_more then more = n > 0 and '+' or '.' end
    if #parts > 0 then front = front .. table.concat(parts) end
    return front .. 'o' .. more, n > 0 and list or nil, m > 0 and set or nil
  end

  -- The place of a lane whose best request has this rank: 'f' full, 'l' later, 'o' open; and its score there.
  local function place_of(run, host, rank)
    local longest = turns and turns.longest_of(host, run)
    local delay, limit = policy(host.settings, hosts[ALL_HOSTS].settings, run, longest)
    if host.in_flight >= limit then
      if not longest then return 'f', freed_by_others(run) end
      run.pause = math.min(run.pause or math.huge, turns.pause_for(delay))
      return 'f', now - 1e12 -- below all others: each lease checks it, the oldest first
    end
    local due = due_at(host, hosts[ALL_HOSTS], delay)
    if due > now then
      if longest and longest > run.delay then due = math.min(due, now + RECHECK) end
      return 'l', due
    end
    return 'o', rank == 0 and '0' or rank -- Redis prints numbers slowly
  end

  local SETS = {o = ':open', l = ':later', f = ':full'}

  -- The member of a lane in the sorted set of its place.
  local function member_at(place, number, record)
    if place ~= 'o' then return number end
    return sub(record, SEQUENCE_AT, SEQUENCE_AT + 7) .. number -- as OPEN_LANE
  end

  -- The record of the only request of a new lane, its place, score and member there. Many hosts have one page.
  local function first_record(run, number, new)
    local is, score = place_of(run, FRESH, new[1])
    local record = pack(ONLY, new[1], new[2], new[3], is .. '.')
    return record, is, score, member_at(is, number, record)
  end

  -- Collect the changes of the touched lanes of a run, and where they belong now.
  local function place(run)
    load_lanes(run, run.touched_list)
    local added, removed = {o = {}, l = {}, f = {}}, {o = {}, l = {}, f = {}}
    local records, lists, sets, n = {}, {}, {}, 0
    for i = 1, #run.touched_list do
      local number = run.touched_list[i]
      local stored, new, record = run.lanes[number] or '', run.queued[number], run.rests[number]
      local was = sub(stored, -2, -2)
      if hosts[number] == FRESH and not new[4] then
        local is, score, member
        record, is, score, member = first_record(run, number, new)
        local to = added[is]
        local m = #to
        to[m + 1], to[m + 2] = score, member
        records[n + 1], records[n + 2] = number, record
        n = n + 2
      elseif new or record or was == 'f' or run.touched[number] == 'stale' then
        record = record or stored
        if new then record, lists[number], sets[number] = extend(run, record, new) end
        local is, score, old, fresh = '', 0, nil, nil
        if #record < FRONTED_SIZE then
          record = ''
        else
          is, score = place_of(run, hosts[number], (read(FRONTED, record)))
          if is ~= sub(record, -2, -2) then record = sub(record, 1, -3) .. is .. sub(record, -1) end
          fresh = member_at(is, number, record)
        end
        if was ~= '' then old = member_at(was, number, stored) end
        if old and (was ~= is or old ~= fresh) then
          local from = removed[was]
          from[#from + 1] = old
        end
        if fresh and (is ~= 'o' or was ~= 'o' or old ~= fresh) then
          local to = added[is]
          to[#to + 1] = score
          to[#to + 1] = fresh
        end
        if record ~= stored then
          run.lanes[number] = record
          records[n + 1], records[n + 2] = number, record
          n = n + 2
        end
      end
    end
    return added, removed, records, lists, sets
  end

  local function save_lanes(run, added, removed, records, lists, sets)
    for number, count in pairs(run.unlisted) do call('LTRIM', list_key(run, number), count, -1) end
    for number, count in pairs(run.unsorted) do call('ZREMRANGEBYRANK', set_key(run, number), 0, count - 1) end
    for number, list in pairs(lists) do many('RPUSH', list_key(run, number), list) end
    for number, set in pairs(sets) do many('ZADD', set_key(run, number), set) end
    for part, name in pairs(SETS) do
      many('ZREM', run.key .. name, removed[part])
      many('ZADD', run.key .. name, added[part])
    end
    many('HSET', run.key .. ':lane', records)
  end

  -- Write the collected changes.
  function finish()
    local lanes = {}
    for number, run in pairs(runs) do
      if run and #run.touched_list > 0 then lanes[number] = {place(run)} end
    end
    for number, run in pairs(runs) do
      if run then
        many('HSET', run.key .. ':req', run.records)
        if lanes[number] then save_lanes(run, unpack(lanes[number])) end
        save_notes(run)
        save_deaths(run)
        save_ledger(run)
        collect(run)
      end
    end
    save_hosts()
    save_state()
  end
end

-- Let every host wait one delay from now.
local function let_all_wait()
  load_hosts({})
  hosts[ALL_HOSTS].ended_at = now
  change(hosts[ALL_HOSTS])
  finish()
end
