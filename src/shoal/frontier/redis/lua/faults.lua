-- Prepended to the scripts of an audit and of a repair: collects faults, and finds requests in their lanes.

local fault_counts, fault_examples, fault_list = {}, {}, {}

-- Count a fault of a kind in shoal/frontier/faults.py. The example is a fingerprint, the number of a host, or a text.
local function blame(kind, example, count)
  if not fault_counts[kind] then
    fault_counts[kind], fault_examples[kind] = 0, example or ''
    fault_list[#fault_list + 1] = kind
  end
  fault_counts[kind] = fault_counts[kind] + (count or 1)
end

-- The faults that were found: kind, count, example, ...
local function found_faults()
  local answer = {}
  for _, kind in ipairs(fault_list) do
    for _, value in ipairs({kind, fault_counts[kind], fault_examples[kind]}) do answer[#answer + 1] = value end
  end
  return answer
end

local sizes = {} -- of lists, by host

-- Whether a lane leads to this entry of its list. The list is in the order of the sequence numbers.
local function is_listed(run, number, sequence)
  local key = list_key(run, number)
  sizes[number] = sizes[number] or call('LLEN', key)
  local low, high = 0, sizes[number] - 1
  while low <= high do
    local middle = math.floor((low + high) / 2)
    local _, other = read(FRONTED, call('LINDEX', key, middle))
    if other == sequence then return true end
    if other < sequence then low = middle + 1 else high = middle - 1 end
  end
  return false
end

-- Whether the lane of a ready request leads to it. Its lane is loaded.
local function is_queued(run, fingerprint, request)
  local record = run.lanes[request.host]
  local more = sub(record, -1)
  for at = 1, #record - FRONTED_SIZE, FRONTED_SIZE do
    local _, _, other = read(FRONTED, record, at)
    if other == fingerprint then return true end
  end
  if more == '#' then
    local score = call('ZSCORE', set_key(run, request.host), pack(QUEUED, request.sequence, fingerprint))
    if score then return true end
  end
  return (more == '#' or more == '+') and is_listed(run, request.host, request.sequence)
end

-- The sorted set of a lane by the place in its record, and its member there.
local PLACES = {o = ':open', l = ':later', f = ':full'}

local function place_of_lane(number, record)
  local place = sub(record, -2, -2)
  if place ~= 'o' then return place, number end
  return place, sub(record, SEQUENCE_AT, SEQUENCE_AT + 7) .. number -- as OPEN_LANE
end
