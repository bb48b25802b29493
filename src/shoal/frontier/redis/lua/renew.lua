-- Renew leases. ARGV: ttl, fingerprints and tokens. Returns 1 for each renewed lease, 0 if it was lost.

local until_when = now + tonumber(ARGV[5])
local fingerprints, tokens, requests = read_leases(ARGV[6])
local members, answer = {}, {}
for i, request in ipairs(requests) do
  answer[i] = 0
  if request and request.token == tokens[i] then
    answer[i] = 1
    members[#members + 1] = until_when
    members[#members + 1] = lease_member(own, request.host, fingerprints[i])
  end
end
many('ZADD', LEASES, members)
save_state()
return answer
