-- End leases: done, failed, or released. ARGV: a document with cookies of the run to write first, see put_document, or nothing;
-- the endings; what follows those that have texts, items or children; then the names of the children's hosts. The children of
-- an ending may also be in a stage.
-- Returns for each ending the new state (-1 if the lease was lost), how many children were added, known and refused, and the
-- number of the completion, packed. A repeated completion is acknowledged again, without its children. Returns nothing, and
-- changes nothing, if a stage has expired. With cookies, returns the new version of the run's cookies, which each lease answers
-- with, and this text. If the document has another version, changes nothing, and the version is 0.

if now < met_until then define_turns() end

local document, heads, blob, names = ARGV[5], ARGV[6], ARGV[7], arguments_from(8)
local count = #heads / ENDING_SIZE

move_staged()

-- -- reading

local fingerprints = {}
for i = 1, count do
  local at = ENDING_SIZE * (i - 1)
  fingerprints[i] = sub(heads, at + 1, at + FINGERPRINT_SIZE)
end
local records = fetch(own.key .. ':req', fingerprints)

local states, orders, pages = {}, {}, {} -- by ending; `pages` are those with texts, items, children or a stage
local offers, ended, numbers, at = {}, {}, {}, 1

-- Read what follows an ending.
local function read_page(page, has_texts, items, children)
  if has_texts == 1 then
    page.kind, at = read(TEXT, blob, at)
    page.text, at = read(TEXT, blob, at)
  end
  for i = 1, items do page.items[i], at = read(TEXT, blob, at) end
  page.first_child = at
  for _ = 1, children do at = at + OFFER_SIZE + read(SIZE, blob, at) end
  return page
end

local function read_children(page)
  local place = page.first_child
  for _ = 1, page.children do
    local offer
    offer, place = read_offer(blob, place)
    offer.parent = page
    offers[#offers + 1] = offer
  end
end

local PLAIN = {kind = '', text = '', items = {}, children = 0, chunks = 0, links = 0, added = 0, refused = 0}

for i = 1, count do
  local fingerprint, token, outcome, redirected, has_texts, items, children, chunks, links =
    read(TO_END, heads, ENDING_SIZE * (i - 1) + 1)
  local record, page, new = records[i], PLAIN, -1
  if has_texts + items + children + chunks > 0 then
    page = {
      kind = '', text = '', items = {}, children = children, chunks = chunks, links = links, added = 0, refused = 0,
      is_redirect = redirected == 1,
    }
    read_page(page, has_texts, items, children)
  end
  if record and #record >= MIN_SIZE and record_token(record) == token then
    local state, _, _, _, host, attempts = read(PROGRESS, record)
    if state == LEASED and not ended[fingerprint] then
      ended[fingerprint] = true
      new = outcome
      if outcome == WAITING and attempts >= own.max_attempts then new = DEAD end
      numbers[#numbers + 1] = host
      if page.children > 0 and (new == DONE or new == DEAD) then read_children(page) end
      if chunks > 0 and call('HLEN', stage_key(token)) ~= chunks then return '' end
    elseif state == DONE and outcome == DONE then -- a repeat
      orders[i] = select(5, read(DONE_PART, record))
    end
  end
  states[i], pages[i] = new, page
end
load_hosts(numbers)
find_new()

-- -- changing

local cookies
if document ~= '' then
  local words, place = {}, 1
  for i = 1, 5 do words[i], place = read(TEXT, document, place) end
  if put_document(#ARGV + 1, unpack(words)) == 0 then return {0, ''} end
  cookies = call('INCR', own.key .. ':cookies')
end

-- Called first, as it can fail: if another program wrote to the item log. The items of a page are one entry, whose id is
-- the number of its last item. `index`: of the first item of this page.
local function log_items(page, fingerprint, index, token)
  local items, at_once = page.items, 1000
  for first = 1, #items, at_once do
    local fields = {}
    for i = first, math.min(first + at_once - 1, #items) do
      fields[#fields + 1] = 'i'
      fields[#fields + 1] = items[i]
    end
    own.items = own.items + #fields / 2
    local key = pack(ITEM_KEY, fingerprint, index + first - 1, token)
    call('XADD', own.key .. ':items', own.items .. '-0', 'k', key, unpack(fields))
  end
end

for i = 1, count do
  local page = pages[i]
  if page.items[1] and (states[i] == DONE or states[i] == DEAD) then
    local _, _, items = read(PROGRESS, records[i])
    log_items(page, fingerprints[i], items, record_token(records[i]))
  end
end
add(offers, blob, names, room_for_links())

local waiting = {}

local function complete(i, status, page)
  local record = records[i]
  local _, _, items, _, host = read(PROGRESS, record)
  own.leased, own.done = own.leased - 1, own.done + 1
  orders[i] = own.done
  if page.text ~= '' then note(own, fingerprints[i], NOTE_EVENT, page.text, read_record(record).worker) end
  local done = pack(DONE_PART, DONE, status, items + #page.items, real, own.done) .. sub(record, DONE_SIZE + 1)
  local n = #own.records
  own.records[n + 1], own.records[n + 2] = fingerprints[i], done
  return host
end

-- A request is released, waits for another attempt, or is dead.
local function give_up(i, state, status, retry_in, page)
  local fingerprint, request = fingerprints[i], read_record(records[i])
  if state ~= READY then
    local after = state == DEAD and '' or string.format(WAITS_DETAIL, retry_in)
    note(own, fingerprint, string.format(FAILED_EVENT, request.attempts), page.text .. after, request.worker)
    request.status = status
  else
    request.attempts = math.max(0, request.attempts - 1)
  end
  if state == DEAD then
    die(own, fingerprint, page.kind, page.text)
    request.items = request.items + #page.items
  elseif state == WAITING then
    waiting[#waiting + 1] = now + retry_in
    waiting[#waiting + 1] = fingerprint
  end
  move(own, fingerprint, request, state)
  request.at = real
  save_record(own, fingerprint, request)
  return request.host
end

local leases, over, staged, answer, n = {}, {}, {}, {}, 0
for i = 1, count do
  local state, page, fingerprint, known = states[i], pages[i], fingerprints[i], 0
  if state >= 0 then
    local contacted, status, duplicates, item_errors, retry_in =
      read(HOW_ENDED, heads, ENDING_SIZE * (i - 1) + TO_END_SIZE + 1)
    local host
    if state == DONE then host = complete(i, status, page) else host = give_up(i, state, status, retry_in, page) end
    end_lease(own, hosts[host], contacted == 1)
    n = n + 1
    leases[n], over[n] = lease_member(own, host, fingerprint), fingerprint
    if page.chunks > 0 then staged[#staged + 1] = {state = state, token = record_token(records[i]), page = page} end
    own.duplicates = own.duplicates + duplicates
    if page.is_redirect and state == DONE then own.redirects = own.redirects + 1 end
    if state == DONE or state == DEAD then own.item_errors = own.item_errors + item_errors end
    known = page.children - page.added - page.refused + duplicates
  elseif orders[i] then
    state = DONE
  end
  answer[i] = pack(SETTLED, state, page.added, known, page.refused, orders[i] or 0)
end
for _, each in ipairs(staged) do
  if each.state == DONE or each.state == DEAD then
    own.incoming = own.incoming + each.page.links
    call('PERSIST', stage_key(each.token))
    call('RPUSH', STAGES, pack(STAGE, each.token, each.page.chunks, each.page.links))
  else
    call('UNLINK', stage_key(each.token))
  end
end
own.has_ended = turns and n > 0
finish()
many('ZREM', LEASES, leases)
forget(own, over)
many('ZADD', own.key .. ':waiting', waiting)
answer = table.concat(answer)
return cookies and {cookies, answer} or answer
