-- End leases: done, failed, or released. ARGV: the endings, then the names of the children's hosts. The children of an
-- ending follow it, or are in a stage.
-- Returns for each ending the new state (-1 if the lease was lost), how many children were added, known and refused, and the
-- number of the completion. A repeated completion is acknowledged again, without its children. Returns nothing, and changes nothing,
-- if a stage has expired.

local blob, names = ARGV[5], arguments_from(6)
local endings, fingerprints, offers, at = {}, {}, {}, 1

-- -- reading

local NOTHING = {}

local function read_ending()
  local fingerprint, token, outcome, contacted, redirected, status, duplicates, retry_in, items, children, chunks, links,
    kind, text, after =
    read(ENDING, blob, at)
  local logged = NOTHING
  if items > 0 then
    logged = {}
    for i = 1, items do logged[i], after = read(TEXT, blob, after) end
  end
  at = after
  for _ = 1, children do at = at + OFFER_SIZE + read(SIZE, blob, at) end
  return {
    fingerprint = fingerprint, token = token, outcome = outcome, contacted = contacted == 1, status = status,
    duplicates = duplicates, retry_in = retry_in, items = logged, children = children, first_child = after,
    kind = kind, text = text, chunks = chunks, links = links, added = 0, refused = 0, request = false, state = -1,
    order = 0, is_again = false, is_redirect = redirected == 1,
  }
end

move_staged()
local n = 0
while at <= #blob do
  n = n + 1
  endings[n] = read_ending()
  fingerprints[n] = endings[n].fingerprint
end

-- The new state of a request.
local function new_state(ending, request)
  if ending.outcome ~= WAITING then return ending.outcome end
  return request.attempts < own.max_attempts and WAITING or DEAD
end

local function read_children(ending)
  local place = ending.first_child
  for _ = 1, ending.children do
    local offer
    offer, place = read_offer(blob, place)
    offer.parent = ending
    offers[#offers + 1] = offer
  end
end

local records, ended, numbers = fetch(own.key .. ':req', fingerprints), {}, {}
for i, ending in ipairs(endings) do
  local request = read_record(records[i])
  if request and request.state == LEASED and request.token == ending.token and not ended[ending.fingerprint] then
    ended[ending.fingerprint] = true
    ending.request = request
    ending.state = new_state(ending, request)
    numbers[#numbers + 1] = request.host
    if ending.state == DONE or ending.state == DEAD then read_children(ending) end
    if ending.chunks > 0 and call('HLEN', stage_key(ending.token)) ~= ending.chunks then return {} end
  elseif request and request.state == DONE and request.token == ending.token and ending.outcome == DONE then
    ending.state, ending.order, ending.is_again = DONE, request.host, true
  end
end
load_hosts(numbers)
find_new()

-- -- changing

-- Called first, as it can fail: if another program wrote to the item log. The items of a page are one entry, whose id is
-- the number of its last item.
local function log_items(ending)
  local request, at_once = ending.request, 1000
  for first = 1, #ending.items, at_once do
    local fields = {}
    for i = first, math.min(first + at_once - 1, #ending.items) do
      fields[#fields + 1] = 'i'
      fields[#fields + 1] = ending.items[i]
    end
    own.items = own.items + #fields / 2
    local key = pack(ITEM_KEY, ending.fingerprint, request.items, ending.token)
    call('XADD', own.key .. ':items', own.items .. '-0', 'k', key, unpack(fields))
    request.items = request.items + #fields / 2
  end
end

local function add_event(ending)
  local text = ending.text
  if ending.state == DONE then
    if text ~= '' then note(own, ending.fingerprint, NOTE_EVENT, text, ending.request.worker) end
  elseif ending.state ~= READY then
    local is_dead = ending.state == DEAD
    local after = is_dead and '' or string.format(WAITS_DETAIL, ending.retry_in)
    local what = string.format(FAILED_EVENT, ending.request.attempts)
    note(own, ending.fingerprint, what, text .. after, ending.request.worker)
    if is_dead then die(own, ending.fingerprint, ending.kind, text) end
  end
end

local leases, over, waiting, staged, answer = {}, {}, {}, {}, {}
for _, ending in ipairs(endings) do
  local is_over = ending.request and (ending.state == DONE or ending.state == DEAD)
  if is_over and ending.items ~= NOTHING then log_items(ending) end
end
add(offers, blob, names, room_for_links())
for i, ending in ipairs(endings) do
  local request, fingerprint = ending.request, ending.fingerprint
  if request then
    leases[#leases + 1], over[#over + 1] = lease_member(own, request.host, fingerprint), fingerprint
    add_event(ending)
    move(own, fingerprint, request, ending.state)
    request.at = real
    if ending.state == READY then
      request.attempts = math.max(0, request.attempts - 1)
    else
      request.status = ending.status
    end
    if ending.state == WAITING then
      waiting[#waiting + 1] = now + ending.retry_in
      waiting[#waiting + 1] = fingerprint
    end
    end_lease(own, hosts[request.host], ending.contacted)
    if ending.state == DONE then
      ending.order = own.done
      request.host = own.done
    end
    if ending.chunks > 0 then staged[#staged + 1] = ending end
    save_record(own, fingerprint, request)
    own.duplicates = own.duplicates + ending.duplicates
  end
  local known = ending.is_again and 0 or ending.children - ending.added - ending.refused + ending.duplicates
  answer[5 * i - 4], answer[5 * i - 3], answer[5 * i - 2] = ending.state, ending.added, known
  answer[5 * i - 1], answer[5 * i] = ending.refused, ending.order
end
for _, ending in ipairs(staged) do
  if ending.state == DONE or ending.state == DEAD then
    own.incoming = own.incoming + ending.links
    call('PERSIST', stage_key(ending.token))
    call('RPUSH', STAGES, pack(STAGE, ending.token, ending.chunks, ending.links))
  else
    call('UNLINK', stage_key(ending.token))
  end
end
finish()
many('ZREM', LEASES, leases)
forget(own, over)
many('ZADD', own.key .. ':waiting', waiting)
return answer
