-- Make dead requests ready again. ARGV: cursor, how many to read, 1 for these kinds or 0 for all others, the kinds.
-- Returns the next cursor ('0' at the end), and how many were retried.

local meant, key = ARGV[7] == '1', own.key .. ':dead'
local kinds, chosen, kind_of, numbers, requests = {}, {}, {}, {}, {}
for _, kind in ipairs(arguments_from(8)) do kinds[kind] = true end
local cursor = scan(key, ARGV[5], ARGV[6], function(fingerprint, cause)
  local kind = read(TEXT, cause)
  if (kinds[kind] or false) == meant and not kind_of[fingerprint] then
    kind_of[fingerprint] = kind
    chosen[#chosen + 1] = fingerprint
  end
end)

local records = fetch(own.key .. ':req', chosen)
for i in ipairs(chosen) do
  requests[i] = read_record(records[i])
  if requests[i] then numbers[#numbers + 1] = requests[i].host end
end
load_hosts(numbers)
local retried = {}
for i, fingerprint in ipairs(chosen) do
  local request, kind = requests[i], kind_of[fingerprint]
  if request and request.state == DEAD and request.host > 0 then -- else its record is lost
    retried[#retried + 1] = fingerprint
    own.kinds[kind] = (own.kinds[kind] or 0) - 1
    note(own, fingerprint, RETRIED_EVENT, RETRIED_DETAIL, 0)
    move(own, fingerprint, request, READY)
    request.attempts, request.at = 0, real
    save_record(own, fingerprint, request)
  end
end
finish()
many('HDEL', key, retried)
return {cursor, #retried}
