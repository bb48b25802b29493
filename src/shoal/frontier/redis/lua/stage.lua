-- A stage of links. ARGV: what to do, then for
--   put: fingerprint and token of the lease, number of the chunk, the chunk -> 1, or 0 if the lease was lost
--   move: token -> how many of its chunks are left, how many links were added, known and refused so far
--   find: fingerprint, stage and chunk to start with -> stage and chunk to continue with (-1 at the end), record, parent

local act = ARGV[5]

if act == 'put' then
  local request = read_record(call('HGET', own.key .. ':req', ARGV[6]))
  if not request or request.state ~= LEASED or request.token ~= ARGV[7] then return 0 end
  local key = stage_key(ARGV[7])
  call('HSET', key, ARGV[8], ARGV[9])
  call('PEXPIRE', key, UPLOAD_MS)
  return 1
end

if act == 'move' then
  move_staged()
  local key, left = stage_key(ARGV[6]), 0
  local outcome = call('HMGET', key, 'next', 'added', 'known', 'refused')
  for _, entry in ipairs(call('LRANGE', STAGES, 0, -1)) do
    local token, chunks = read_stage(entry)
    if token == ARGV[6] then left = chunks - (tonumber(outcome[1]) or 0) end
  end
  return {left, tonumber(outcome[2]) or 0, tonumber(outcome[3]) or 0, tonumber(outcome[4]) or 0}
end

local fingerprint, number, place, at_once = ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8]), 20
local entry = call('LINDEX', STAGES, number)
if not entry then return {-1, 0, '', ''} end
local token, chunks = read_stage(entry)
for each = place, math.min(place + at_once, chunks) - 1 do
  local chunk = call('HGET', stage_key(token), each)
  if chunk and string.find(chunk, fingerprint, 1, true) then
    local count, _, at = read_chunk(chunk)
    for _ = 1, count do
      local offer
      offer, at = read_offer(chunk, at)
      if offer.fingerprint == fingerprint then
        local record = pack(HEAD, READY, 0, 0, real, ALL_HOSTS, 0, 0, NO_TOKEN, 0) .. sub(chunk, offer.from, offer.to)
        return {-1, 0, record, call('HGET', own.key .. ':req', record_parent(record)) or ''}
      end
    end
  end
end
if place + at_once < chunks then return {number, place + at_once, '', ''} end
return {number + 1, 0, '', ''}
