-- Links of very large pages, which would block the server for too long in one script.
--
-- They are uploaded in chunks to a stage: a hash, `stage:TOKEN`, that expires if it is not used. The script that ends the
-- lease adds the stage to the list `stages`. Then each script that leases or ends leases first moves one chunk into the
-- queue. `incoming` counts the links of stages in the list.
--
-- A chunk has the number of its links, the names of their hosts, and the offers. A stage also has the number of the `next`
-- chunk to move, and how many links were `added`, `known` and `refused`.

local STAGE = '<c8I4I4' -- token, chunks, links that are left
local STAGES = own and own.key .. ':stages'
local UPLOAD_MS, OUTCOME_MS = 600000, 60000

local MAX_CHUNKS = 100000 -- more of them were never uploaded: another program wrote this number

local function stage_key(token) return own.key .. ':stage:' .. token end

local function read_stage(entry)
  local token, chunks, links = read(STAGE, entry)
  return token, math.min(chunks, MAX_CHUNKS), links
end

-- The next chunk of a stage, from 0.
local function next_chunk(key) return math.max(0, tonumber(call('HGET', key, 'next')) or 0) end

local function read_chunk(chunk)
  local count, hosts_count, at = read(CHUNK, chunk)
  local names = {}
  for i = 1, hosts_count do names[i], at = read(TEXT, chunk, at) end
  return count, names, at
end

-- Remove a stage that has no more chunks. Links are left only if another program deleted chunks: an audit reports them.
local function close_stage(key, left)
  if left > 0 then call('HINCRBY', own.key, 'lost_links', left) end
  own.incoming, own.is_changed = math.max(0, own.incoming - left), true
  finish()
  call('LPOP', STAGES)
  call('PEXPIRE', key, OUTCOME_MS)
end

-- Move one chunk of the first stage into the queue.
local function move_staged()
  if own.incoming <= 0 then return end
  local entry = call('LINDEX', STAGES, 0)
  if not entry then return close_stage(STAGES, own.incoming) end
  local token, chunks, links = read_stage(entry)
  local key = stage_key(token)
  local place, chunk = next_chunk(key) - 1, false
  while not chunk and place + 1 < chunks do
    place = place + 1
    chunk = call('HGET', key, place)
  end
  if not chunk then return close_stage(key, links) end

  local count, names, at = read_chunk(chunk)
  local offers, moved = {}, {added = 0, refused = 0}
  for i = 1, count do
    offers[i], at = read_offer(chunk, at)
    offers[i].parent = moved
  end
  find_new()
  add(offers, chunk, names, room_for_links())
  offered, offered_list = {}, {}
  own.incoming = own.incoming - count
  finish()
  call('HDEL', key, place)
  call('HSET', key, 'next', place + 1)
  call('HINCRBY', key, 'added', moved.added)
  call('HINCRBY', key, 'known', count - moved.added - moved.refused)
  if moved.refused > 0 then call('HINCRBY', key, 'refused', moved.refused) end
  if place + 1 < chunks then
    call('LSET', STAGES, 0, pack(STAGE, token, chunks, links - count))
  else
    close_stage(key, links - count)
  end
end
