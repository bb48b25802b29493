-- Histories of requests. ARGV: fingerprints. Returns for each: record, parent's record, events, cause of death, 1 if it is
-- leased and not begun, else 0, and the worker or slot of its lease or ''; an empty list for an unknown request.

local fingerprints, answer = arguments_from(5), {}
local records = fetch(own.key .. ':req', fingerprints)
local events = fetch(own.key .. ':event', fingerprints)
local causes = fetch(own.key .. ':dead', fingerprints)
local sent = fetch(own.key .. ':sent', fingerprints)
for i in ipairs(fingerprints) do
  local record = records[i]
  if record then
    local parent = #record >= MIN_SIZE and call('HGET', own.key .. ':req', record_parent(record))
    local request = read_record(record)
    local unbegun = is_unbegun(request, sent[i]) and 1 or 0
    local slot = request and CLAIMED[request.state] and holder_name(own, request.worker) or ''
    answer[i] = {record, parent or '', events[i] or '', causes[i] or '', unbegun, slot}
  else
    answer[i] = {}
  end
end
return answer
