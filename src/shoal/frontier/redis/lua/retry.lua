-- Make dead requests ready again. ARGV: cursor, how many to read, 1 for these kinds or 0 for all others, the kinds. Or
-- 'refused' and how many: links that were refused because the queue was full, best first, while there is room. Or 'named',
-- the number of kinds, 1 or 0, the kinds, and fingerprints: these requests; refused ones among them while there is room.
-- Returns the next cursor ('0' at the end), and how many were retried.

local cursor, count, key, refused = ARGV[5], tonumber(ARGV[6]), own.key .. ':dead', own.key .. ':refused'
local chosen, kind_of, members = {}, {}, {}

local function choose_dead()
  local meant, kinds = ARGV[7] == '1', {}
  for _, kind in ipairs(arguments_from(8)) do kinds[kind] = true end
  cursor = scan(key, cursor, count, function(fingerprint, cause)
    local kind = read(TEXT, cause)
    if (kinds[kind] or false) == meant and not kind_of[fingerprint] then
      kind_of[fingerprint] = kind
      chosen[#chosen + 1] = fingerprint
    end
  end)
end

local function choose_refused()
  local most = math.min(count, room_for_links() or count)
  if most > 0 then members = call('ZRANGE', refused, 0, most - 1) end
  for i, member in ipairs(members) do
    chosen[i] = select(2, read(QUEUED, member))
    kind_of[chosen[i]] = FULL_KIND
  end
  if #members < count then cursor = '0' end
end

local function choose_named()
  local meant, kinds, named, late = ARGV[7] == '1', {}, {}, {}
  for i, word in ipairs(arguments_from(8)) do
    if i <= count then kinds[word] = true else named[#named + 1] = word end
  end
  local causes, found = fetch(key, named), fetch(own.key .. ':req', named)
  for i, fingerprint in ipairs(named) do
    local kind = causes[i] and read(TEXT, causes[i])
    local request = kind and (kinds[kind] or false) == meant and not kind_of[fingerprint] and read_record(found[i])
    if request then
      kind_of[fingerprint] = kind
      if kind == FULL_KIND then
        late[#late + 1] = {rank = request.rank, member = pack(QUEUED, request.sequence, fingerprint), name = fingerprint}
      else
        chosen[#chosen + 1] = fingerprint
      end
    end
  end
  table.sort(late, function(one, other)
    return one.rank < other.rank or (one.rank == other.rank and one.member < other.member)
  end)
  local room = room_for_links() or #named
  for _, link in ipairs(late) do
    if #chosen >= room then break end
    chosen[#chosen + 1] = link.name
    members[#members + 1] = link.member
  end
  cursor = '0'
end

if cursor == 'refused' then choose_refused() elseif cursor == 'named' then choose_named() else choose_dead() end

local records, requests, numbers = fetch(own.key .. ':req', chosen), {}, {}
for i in ipairs(chosen) do
  requests[i] = read_record(records[i])
  if requests[i] then numbers[#numbers + 1] = requests[i].host end
end
load_hosts(numbers)
local retried = {}
for i, fingerprint in ipairs(chosen) do
  local request, kind = requests[i], kind_of[fingerprint]
  if request and request.state == DEAD and request.host ~= ALL_HOSTS then -- else its record is lost
    retried[#retried + 1] = fingerprint
    own.kinds[kind] = (own.kinds[kind] or 0) - 1
    note(own, fingerprint, RETRIED_EVENT, kind == FULL_KIND and ADMITTED_DETAIL or RETRIED_DETAIL, 0)
    move(own, fingerprint, request, READY)
    request.attempts, request.at = 0, real
    save_record(own, fingerprint, request)
  end
end
finish()
many('HDEL', key, retried)
many('ZREM', refused, members)
return {cursor, #retried}
