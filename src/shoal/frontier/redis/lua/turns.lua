-- Runs that share a host. The rules are in shoal/frontier/host_policy.py.
--
-- `store` has the run that leased last (`leased_by`). When another one leases, runs have met: until `met_until` each host that
-- is leased from has an entry in `turns`, with its time and the runs that use it. Before that one run was alone (`alone`), and
-- has no entries; its lanes tell which hosts it uses. A run has the times when it last `called` and `asked`.

local longest_of, ask_for, ask_for_all, turns_for, take_turns, save_turns

-- Define these functions. Most scripts need none of them.
local function define_turns()
  local TIME, USE = '<d', '<I4dd' -- the time of a host; for each run its number, what it used, when it was seen
  local alone, sharing = nil, {}

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
      local number = tonumber(call('HGET', PREFIX .. 'store', 'alone'))
      alone = number and number ~= own.number and run_of(number) or false
    end
    if alone and call('HEXISTS', alone.key .. ':lane', host.number) == 1 then
      uses[1] = {run = alone, used = 0, seen = host.in_flight > 0 and now or host.ended_at}
    end
  end

  local function is_here(use, number)
    local run = use.run
    if not run or RESTING[run.state] or not is_live(load_presence(run).called, run.delay, now) then return false end
    return is_live(use.seen, run.delay, now) or wants(run, number)
  end

  -- The runs that use a host, without those that are gone.
  local function uses_of(host)
    if host.uses then return host.uses end
    local all, at = {}, 1
    host.time = 0
    if host.turns == '' then
      add_alone(host, all)
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
  function longest_of(host, run)
    local longest, of
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
  function ask_for(host)
    if host.has_asked then return end
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

  function ask_for_all(numbers)
    for _, number in ipairs(numbers) do ask_for(hosts[number]) end
  end

  -- How many turns this run may take from a host that is shared.
  function turns_for(host, concurrency, due)
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

  function take_turns(host, count)
    local use = host.own_use
    host.time = math.max(host.time, math.min(use.used, host.least))
    use.used, use.seen = use.used + count / load_presence(own).weight, now
    save_later(host)
  end

  -- `is_short`: the call got less than it wanted.
  function save_turns(is_short)
    local fields, at = {}, string.format('%.6f', now)
    for _, host in ipairs(sharing) do
      local packed = {pack(TIME, host.time)}
      for _, use in ipairs(host.uses) do packed[#packed + 1] = pack(USE, use.run.number, use.used, use.seen) end
      fields[#fields + 1], fields[#fields + 2] = host.number, table.concat(packed)
    end
    many('HSET', TURNS, fields)
    call('HSET', own.key, 'called', at, 'asked', is_short and at or 0)
  end
end

if now < met_until then define_turns() end

-- Note that this run leases. Called before any host is loaded.
local function meet()
  if leased_by == own.number and (met_until == 0 or now < met_until) then return end
  local key, before = PREFIX .. 'store', nil
  if leased_by and leased_by ~= own.number and now >= met_until - MEET_SECONDS / 2 then before = run_of(leased_by) end
  if before and not RESTING[before.state] then
    if now >= met_until then
      call('UNLINK', TURNS)
      call('HSET', key, 'alone', leased_by)
      call('HSET', before.key, 'called', string.format('%.6f', now), 'asked', 0)
      define_turns()
    end
    met_until = now + MEET_SECONDS
  end
  call('HSET', key, 'leased_by', now < met_until and string.format('%d %.6f', own.number, met_until) or own.number)
end
