-- Count requests by state, and check that each one can be found where its state says. ARGV: cursor, how many to read, 1 to
-- look for ready requests in their lanes too. Returns the next cursor ('0' at the end), the counters of the run, the counts,
-- and the faults.

local counts, queued = {}, {}
for state = READY, DEAD do counts[state] = 0 end

local function check_request(fingerprint, record)
  local state = string.byte(record)
  if not counts[state] or #record < MIN_SIZE then return blame(UNREADABLE, fingerprint) end
  counts[state] = counts[state] + 1
  if state == DONE or (state == READY and ARGV[7] ~= '1') then return end
  if state == DEAD then
    if call('HEXISTS', own.key .. ':dead', fingerprint) == 0 then blame('failures', fingerprint) end
  elseif state == WAITING then
    if not call('ZSCORE', own.key .. ':waiting', fingerprint) then blame('waiting', fingerprint) end
  else
    local request = read_record(record)
    if state == READY then
      queued[#queued + 1] = {fingerprint, request}
    elseif not call('ZSCORE', LEASES, lease_member(own, request.host, fingerprint)) then
      blame('leases', fingerprint)
    end
  end
end

local cursor = scan(own.key .. ':req', ARGV[5], ARGV[6], check_request)
local numbers = {}
for i, each in ipairs(queued) do numbers[i] = each[2].host end
load_lanes(own, numbers)
for _, each in ipairs(queued) do
  if not is_queued(own, each[1], each[2]) then blame('ready', each[1]) end
end
return {cursor, call('HGET', own.key, 'counters') or '', {unpack(counts, READY, DEAD)}, found_faults()}
