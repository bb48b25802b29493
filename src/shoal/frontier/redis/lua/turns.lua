-- Prepended to lease.lua, settle.lua and states.lua: runs that share a host. The rules are in
-- shoal/frontier/host_policy.py.
--
-- `store` has the run that leased last (`leased_by`). When another one leases, runs have met: until the time that follows the
-- run there, and longer if another run leases in the last seconds of it (their number comes next), each host that is leased from has an entry in `turns`, with its time and the runs that use it. Before that one
-- run was alone (`alone`), and has no entries; its lanes tell which hosts it uses. A run has the times when it last `called`
-- and `asked`.

local leased_by, met_until, last_seconds = tonumber(shared[4]), 0, 0
if shared[4] and not leased_by then
  leased_by, met_until, last_seconds = string.match(shared[4], '^(%d+) ([%d.]+) ?([%d.]*)$')
  leased_by, met_until, last_seconds = tonumber(leased_by), tonumber(met_until) or 0, tonumber(last_seconds) or 0
end

-- Set `turns` while runs share hosts. `is_leasing`: this run leases; no host is loaded yet. It is one function, and captures
-- few variables, because scripts that need none of this have to create it, too.
local function define_turns(is_leasing)
  local call, pack, read, sub = redis.call, struct.pack, struct.unpack, string.sub
  local STORE, TURNS = PREFIX .. 'store', PREFIX .. 'turns'
  local live_for, is_live, is_asking, turns_left, pause_for = sharing_rules()
  -- The time of a host; for each run its number, what it used, when it was seen. If a run is alone, only the first and the
  -- last of these. (Its number begins with the highest byte, as in `packed_number`.)
  local TIME, USE, ALONE, ALONE_SIZE = '<d', '<I4dd', '>I4<d', 12
  local alone, sharing = nil, {}

  local function is_resting(run) return string.find(RESTING, ' ' .. run.state .. ' ', 1, true) end

  -- Note that another run leases than the last time. A run that leases once while it is live is met again.
  local function meet()
    local before = leased_by and leased_by ~= own.number and run_of(leased_by)
    if before and not is_resting(before) then
      if now >= met_until then
        last_seconds = 0
        call('UNLINK', TURNS)
        call('HSET', STORE, 'alone', leased_by)
        call('HSET', before.key, 'called', string.format('%.6f', now), 'asked', 0)
      end
      last_seconds = math.max(last_seconds, MEET_SECONDS / 2, live_for(own.delay), live_for(before.delay))
      met_until = now + 2 * last_seconds
    end
  end

  if is_leasing and now >= met_until - last_seconds then
    meet()
    if now >= met_until then
      call('HSET', STORE, 'leased_by', own.number)
      return
    end
    call('HSET', STORE, 'leased_by', string.format('%d %.6f %.6f', own.number, met_until, last_seconds))
  end

  local function load_presence(run)
    if run.called then return run end
    local found = call('HMGET', run.key, 'called', 'asked', 'weight')
    run.called, run.asked, run.weight = tonumber(found[1]) or 0, tonumber(found[2]) or 0, tonumber(found[3]) or 1
    return run
  end

  local function wants(run, number)
    local lane = run.lanes[number] or call('HGET', run.key .. ':lane', number) or ''
    run.lanes[number] = lane
    return lane ~= ''
  end

  -- Add the run that was alone, if it uses a host that has no entry.
  local function add_alone(host, uses)
    if alone == nil then
      local number = tonumber(call('HGET', STORE, 'alone'))
      alone = number and number ~= own.number and run_of(number) or false
    end
    if alone and call('HEXISTS', alone.key .. ':lane', host.number) == 1 then
      uses[1] = {run = alone, used = 0, seen = host.in_flight > 0 and now or host.ended_at}
    end
  end

  local function is_here(use, number)
    local run = use.run
    if not run or is_resting(run) or not is_live(load_presence(run).called, run.delay, now) then return false end
    return is_live(use.seen, run.delay, now) or wants(run, number)
  end

  -- The runs that use a host, without those that are gone.
  local function uses_of(host)
    if host.uses then return host.uses end
    local all, at = {}, 1
    host.time = 0
    if host.turns == '' then
      add_alone(host, all)
    elseif #host.turns == ALONE_SIZE then
      local number, seen
      number, seen, at = read(ALONE, host.turns)
      all[1] = {run = run_of(number), used = 0, seen = seen}
    else
      host.time, at = read(TIME, host.turns)
    end
    while at <= #host.turns do
      local number, used, seen
      number, used, seen, at = read(USE, host.turns, at)
      all[#all + 1] = {run = run_of(number), used = used, seen = seen}
    end
    host.uses = {}
    for _, use in ipairs(all) do
      if use.run == own then host.own_use = use end
      if use.run == own or is_here(use, host.number) then table.insert(host.uses, use) end
    end
    return host.uses
  end

  -- The longest delay of the runs that share a host, without this one; nil if there are none. And that run.
  local function longest_of(host, run)
    local longest, of
    if not host.turns then return end -- this script adds the host
    for _, use in ipairs(uses_of(host)) do
      if use.run ~= run and (not longest or use.run.delay > longest) then longest, of = use.run.delay, use.run end
    end
    return longest, of
  end

  local function save_later(host)
    if not host.has_new_turns then
      host.has_new_turns = true
      sharing[#sharing + 1] = host
    end
  end

  -- Ask for a host. Sets `is_shared` if other runs want it too.
  local function ask_for(host)
    if host.has_asked or not host.turns then return end
    host.has_asked = true
    local uses = uses_of(host)
    local use = host.own_use
    if not use then
      if #uses >= MAX_SHARING then
        local last = 1
        for i, each in ipairs(uses) do
          local other = uses[last]
          if each.run.delay < other.run.delay or (each.run.delay == other.run.delay and each.seen < other.seen) then last = i end
        end
        table.remove(uses, last)
      end
      if #uses == 1 then -- it was alone: its turns in flight count, or its last one
        local last = math.max(1, host.in_flight) / load_presence(uses[1].run).weight
        uses[1].used = math.max(uses[1].used, host.time + last)
      end
      use = {run = own, used = host.time, seen = 0}
      uses[#uses + 1], host.own_use = use, use
    end
    host.is_shared = #uses > 1
    if not host.is_shared then host.time, use.used = 0, 0 end
    use.used = math.max(use.used, host.time)
    if now - use.seen >= NOTED_EVERY or host.turns == '' then
      use.seen = now
      save_later(host)
    end
  end

  local function ask_for_all(numbers)
    for _, number in ipairs(numbers) do ask_for(hosts[number]) end
  end

  -- How many turns this run may take from a host that is shared.
  local function left(host, concurrency, due)
    local least = math.huge
    for _, use in ipairs(host.uses) do
      local run = use.run
      if run ~= own and wants(run, host.number) then
        if is_asking(run.asked, due, now) then
          least = math.min(least, math.max(host.time, use.used))
        elseif run.asked > 0 then -- its time is over: no host waits for it, unless it asks again
          run.asked = 0
          call('HSET', run.key, 'asked', 0)
        end
      end
    end
    host.least = least
    if least == math.huge then return concurrency end
    return turns_left(concurrency, load_presence(own).weight, host.own_use.used, least)
  end

  local function take(host, count)
    local use = host.own_use
    host.time = math.max(host.time, math.min(use.used, host.least))
    use.used, use.seen = use.used + count / load_presence(own).weight, now
    save_later(host)
  end

  -- `is_short`: the call got less than it wanted.
  local function save(is_short)
    local fields, at = {}, string.format('%.6f', now)
    for _, host in ipairs(sharing) do
      local packed = {pack(TIME, host.time)}
      for _, use in ipairs(host.uses) do packed[#packed + 1] = pack(USE, use.run.number, use.used, use.seen) end
      if not packed[3] then packed = {pack(ALONE, own.number, host.own_use.seen)} end
      fields[#fields + 1], fields[#fields + 2] = host.number, table.concat(packed)
    end
    many('HSET', TURNS, fields)
    call('HSET', own.key, 'called', at, 'asked', is_short and at or 0)
  end

  -- Hosts that nobody else uses have no turns.
  local function load(numbers)
    local packed, is_recent = fetch(TURNS, numbers), now - NOTED_EVERY
    for i = 1, #numbers do
      local found = packed[i] or ''
      local is_mine = #found == ALONE_SIZE and sub(found, 1, 4) == own.packed_number
      if not is_mine or read(TIME, found, 5) < is_recent then hosts[numbers[i]].turns = found end
    end
  end

  turns = {
    load = load, longest_of = longest_of, ask_for = ask_for, ask_for_all = ask_for_all, left = left, take = take,
    save = save, pause_for = pause_for,
  }
end
