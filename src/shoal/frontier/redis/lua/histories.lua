-- Histories of requests. ARGV: fingerprints. Returns for each: record, parent's record, events, cause of death, and 1 if
-- it is leased and not begun, else 0; an empty list for an unknown request.

local fingerprints, answer = arguments_from(5), {}
local records = fetch(own.key .. ':req', fingerprints)
local events = fetch(own.key .. ':event', fingerprints)
local causes = fetch(own.key .. ':dead', fingerprints)
local sent = fetch(own.key .. ':sent', fingerprints)
for i in ipairs(fingerprints) do
  local record = records[i]
  if record then
    local parent = #record >= MIN_SIZE and call('HGET', own.key .. ':req', record_parent(record))
    local unbegun = is_unbegun(read_record(record), sent[i]) and 1 or 0
    answer[i] = {record, parent or '', events[i] or '', causes[i] or '', unbegun}
  else
    answer[i] = {}
  end
end
return answer
