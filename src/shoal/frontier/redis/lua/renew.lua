-- Keep leases. ARGV: for how many seconds from now, their fingerprints and tokens. Returns 1 for each that is kept,
-- else 0.

local until_when, blob = now + tonumber(ARGV[5]), ARGV[6]
local fingerprints, tokens, at = {}, {}, 1
while at <= #blob do
  fingerprints[#fingerprints + 1], tokens[#tokens + 1], at = read('<c16I8', blob, at)
end
local records, members, answer = fetch(own.key .. ':req', fingerprints), {}, {}
for i, fingerprint in ipairs(fingerprints) do
  local request = read_record(records[i])
  answer[i] = 0
  if request and request.state == LEASED and request.token == tokens[i] then
    answer[i] = 1
    members[#members + 1] = until_when
    members[#members + 1] = lease_member(own, request.host, fingerprint)
  end
end
many('ZADD', LEASES, members)
return answer
