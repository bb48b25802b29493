-- What the run waits for. ARGV: names of hosts. Returns the seconds until the next waiting request is ready, or '', and its
-- events; then for the holders of leases of these hosts: host, run, worker, leases, seconds of silence of a late worker.

local names, wanted, by_run, answer = arguments_from(5), {}, {}, {'', ''}
local first = call('ZRANGE', own.key .. ':waiting', 0, 0, 'WITHSCORES')
if first[1] then
  answer = {time_text(math.max(0, tonumber(first[2]) - now)), call('HGET', own.key .. ':event', first[1]) or ''}
end

for i, number in ipairs(fetch(PREFIX .. 'name', names)) do
  if number then wanted[number] = names[i] end
end
for _, member in ipairs(next(wanted) and call('ZRANGE', LEASES, 0, MAX_HELD - 1) or {}) do
  local number, host, fingerprint = read(LEASE_MEMBER, member)
  if wanted[host] and run_of(number) then
    by_run[number] = by_run[number] or {fingerprints = {}, hosts = {}}
    table.insert(by_run[number].fingerprints, fingerprint)
    table.insert(by_run[number].hosts, wanted[host])
  end
end

for number, held in pairs(by_run) do
  local run, counts = run_of(number), {}
  for i, record in ipairs(fetch(run.key .. ':req', held.fingerprints)) do
    local request = read_record(record)
    local worker, host = request and holder_name(run, request.worker) or '', held.hosts[i]
    counts[host] = counts[host] or {}
    counts[host][worker] = (counts[host][worker] or 0) + 1
  end
  for host, workers in pairs(counts) do
    for worker, leases in pairs(workers) do
      local epoch, session, beat_at = read_worker(run, worker)
      local silent = epoch and now - beat_at >= session * HEARD_GAP and now - beat_at or 0
      for _, value in ipairs({host, run.name, worker, leases, time_text(silent)}) do answer[#answer + 1] = value end
    end
  end
end
return answer
