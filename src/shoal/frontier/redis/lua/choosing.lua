-- Prepended to lease.lua: chooses the best requests, with a heap of lanes by their next request.

local in_play, choose, shorten = {}, nil, nil

do -- a function of Lua has at most 200 local variables: those of this block end with it
  local heap, size = {}, 0
  local share = 2 -- requests expected from a lane

  local function before(a, b) return a.rank < b.rank or (a.rank == b.rank and a.sequence < b.sequence) end

  local function sink()
    local i, lane = 1, heap[1]
    local rank, sequence = lane.rank, lane.sequence
    while 2 * i <= size do
      local child = 2 * i
      local one, other = heap[child], heap[child + 1]
      if other and (other.rank < one.rank or (other.rank == one.rank and other.sequence < one.sequence)) then
        child, one = child + 1, other
      end
      if rank < one.rank or (rank == one.rank and sequence < one.sequence) then break end
      heap[i] = one
      i = child
    end
    heap[i] = lane
  end

  local function enter(lane)
    size = size + 1
    local i = size
    while i > 1 do
      local parent = math.floor(i / 2)
      if not before(lane, heap[parent]) then break end
      heap[i] = heap[parent]
      i = parent
    end
    heap[i] = lane
  end

  local function leave()
    heap[1] = heap[size]
    heap[size] = nil
    size = size - 1
    if size > 0 then sink() end
  end

  -- The next requests of the sorted set of a lane, as in a front.
  local function read_set(lane, wanted)
    local first = lane.from_set or 0
    local pairs_of = call('ZRANGE', set_key(own, lane.number), first, first + wanted - 1, 'WITHSCORES')
    local entries = {}
    for i = 1, #pairs_of, 2 do entries[#entries + 1] = pack(RANK_FIRST, tonumber(pairs_of[i + 1])) .. pairs_of[i] end
    return entries
  end

  -- The best of two lists of requests, and for each whether it is from the second.
  local function best_of(one, other, wanted)
    local best, is_other, i, j = {}, {}, 1, 1
    for n = 1, math.min(wanted, #one + #other) do
      local takes_other = not one[i]
      if one[i] and other[j] then
        local rank, sequence = read(FRONTED, one[i])
        local other_rank, other_sequence = read(FRONTED, other[j])
        takes_other = other_rank < rank or (other_rank == rank and other_sequence < sequence)
      end
      is_other[n] = takes_other
      if takes_other then best[n], j = other[j], j + 1 else best[n], i = one[i], i + 1 end
    end
    return best, is_other, i - 1, j - 1
  end

  -- Read requests after the front of a lane, in growing steps, and enough for a new front.
  local function look_ahead(lane)
    local first, step = lane.from_list or 0, lane.step or share
    local wanted = math.min(lane.room - lane.count, step) + FRONT_LENGTH
    local ahead, more = call('LRANGE', list_key(own, lane.number), first, first + wanted - 1), '.'
    local from_list, from_set, is_from_set = #ahead, 0, nil
    if #ahead == wanted then more = '+' end
    if sub(lane.record, -1) == '#' then
      local set = read_set(lane, wanted)
      local in_list, in_set = #ahead, #set
      ahead, is_from_set, from_list, from_set = best_of(ahead, set, wanted)
      if from_list < in_list then more = '+' end
      if in_set == wanted or from_set < in_set then more = '#' end
    end
    lane.ahead, lane.ahead_at, lane.is_from_set, lane.more, lane.step = ahead, 1, is_from_set, more, step * 4
    lane.from_list, lane.from_set = first + from_list, (lane.from_set or 0) + from_set
  end

  -- '.' if no request of a lane is left to read.
  local function more_of(lane) return lane.more or sub(lane.record, -1) end

  -- Advance a lane to its next request; false if its host is full or it has no more.
  local function advance(lane)
    if lane.count < lane.room then
      if lane.at + FRONTED_SIZE <= #lane.record then
        lane.rank, lane.sequence, lane.fingerprint, lane.at = read(FRONTED, lane.record, lane.at)
        return true
      end
      if not (lane.ahead and lane.ahead[lane.ahead_at]) and more_of(lane) ~= '.' then look_ahead(lane) end
      local entry = lane.ahead and lane.ahead[lane.ahead_at]
      if entry then
        lane.rank, lane.sequence, lane.fingerprint = read(FRONTED, entry)
        lane.ahead_at = lane.ahead_at + 1
        return true
      end
    end
    lane.rank = nil
    return false
  end

  -- The record of what is left of a lane, and how many requests leave its list and its sorted set.
  local function rest_of(lane)
    local back = lane.rank and 1 or 0 -- it was advanced to a request that is not taken
    if not lane.ahead then
      local rest = sub(lane.record, lane.at - back * FRONTED_SIZE)
      if #rest > FRONTED_SIZE or more_of(lane) == '.' then return rest end
      look_ahead(lane)
    end
    local first = lane.ahead_at - back
    if first > #lane.ahead and lane.more ~= '.' then
      look_ahead(lane)
      first = 1
    end
    local last = math.min(#lane.ahead, first + FRONT_LENGTH - 1)
    local front, more = table.concat(lane.ahead, '', first, last), lane.more
    local from_list, from_set = lane.from_list, lane.from_set
    for i = last + 1, #lane.ahead do -- these stay where they are
      if lane.is_from_set and lane.is_from_set[i] then
        from_set, more = from_set - 1, '#'
      else
        from_list = from_list - 1
        if more == '.' then more = '+' end
      end
    end
    return front .. 'o' .. more, from_list, from_set
  end

  -- Collect what is left of a lane; `finish` writes it.
  function shorten(lane)
    local rest, from_list, from_set = rest_of(lane)
    own.rests[lane.number] = rest
    if from_list and from_list > 0 then own.unlisted[lane.number] = from_list end
    if from_set and from_set > 0 then own.unsorted[lane.number] = from_set end
  end

  local listed, listed_at, listed_to, portion, refused = {}, 0, 0, 8, false

  -- The next lane of `open`, or nil. Lanes and their hosts are read in growing portions. `wanted`: how many requests are
  -- still to be chosen. Most often each lane has at least one.
  local function next_open(wanted)
    if listed_at == #listed and portion then
      local size = refused and portion or math.min(portion, wanted)
      local members = call('ZRANGE', own.key .. ':open', listed_to, listed_to + size - 1)
      local numbers, n = {}, 0
      for i = 1, #members do numbers[i] = sub(members[i], LANE_HOST_AT) end
      load_hosts(numbers)
      load_lanes(own, numbers)
      listed, listed_at, listed_to = {}, 0, listed_to + size
      for i = 1, #numbers do
        local number = numbers[i]
        local record = own.lanes[number]
        if record ~= '' then -- else another program changed it
          local rank, sequence, fingerprint, at = read(FRONTED, record)
          n = n + 1
          listed[n] = {
            number = number, rank = rank, sequence = sequence, fingerprint = fingerprint, record = record, at = at,
            room = 0, count = 0,
          }
        end
      end
      portion = #members == size and math.min(1000, portion * 2)
    end
    listed_at = listed_at + 1
    return listed[listed_at]
  end

  -- Whether a lane can be leased from. Its host may not be due any more, or full: another run may have leased from it.
  local function is_due(lane)
    if in_play[lane.number] then return false end
    in_play[lane.number] = true
    local host, all = hosts[lane.number], hosts[ALL_HOSTS]
    if turns then turns.ask_for(host) end
    local delay, most = policy(host.settings, all.settings, own, host.is_shared and turns.longest_of(host, own))
    local due = due_at(host, all, delay)
    lane.room = most - host.in_flight
    refused = true
    if lane.room <= 0 or due > now then
      touch(own, lane.number, 'stale')
      return false
    end
    if host.is_shared then lane.room = math.min(lane.room, turns.left(host, most, due)) end
    if lane.room <= 0 then -- it is the turn of another run
      own.pause = math.min(own.pause or math.huge, SHORT_PAUSE)
      return false
    end
    refused = false
    return true
  end

  -- The best requests, up to a limit: fingerprints, hosts, sequence numbers and ranks; and the lanes that they are from.
  function choose(limit)
    local fingerprints, numbers, sequences, ranks, lanes, n = {}, {}, {}, {}, {}, 0
    local open = call('ZCARD', own.key .. ':open')
    if open > 0 and open < limit then share = 2 + math.floor(limit / open) end
    local function take_next(lane)
      n = n + 1
      fingerprints[n], numbers[n], sequences[n], ranks[n] = lane.fingerprint, lane.number, lane.sequence, lane.rank
      if lane.count == 0 then lanes[#lanes + 1] = lane end
      lane.count = lane.count + 1
      return advance(lane)
    end
    local candidate = limit > 0 and next_open(limit)
    while n < limit and (candidate or heap[1]) do
      local best = heap[1]
      if candidate and not (best and before(best, candidate)) then
        if is_due(candidate) and take_next(candidate) then enter(candidate) end
        candidate = n < limit and next_open(limit - n)
      elseif take_next(best) then
        sink()
      else
        leave()
      end
    end
    return fingerprints, numbers, sequences, ranks, lanes
  end
end
