-- Write a document if its version is the expected one ('' for none). ``writes``: '1' to write or '0' to delete. ``run_at``: the
-- place in ARGV of the arguments of create_run, if there are any, to create a run with it. Returns 0 if it has another version.
local function put_document(run_at, key, expected, version, writes, value)
  local found = call('HGET', PREFIX .. 'document', key)
  local stored = found and sub(found, 2, 1 + string.byte(found)) or ''
  if stored == version or (writes == '0' and stored == '') then return 1 end
  if stored ~= expected then return 0 end
  if ARGV[run_at] then create_run(run_at) end
  if writes == '0' then
    call('ZREM', PREFIX .. 'documents', key)
    call('HDEL', PREFIX .. 'document', key)
  else
    if stored == '' then call('ZADD', PREFIX .. 'documents', 0, key) end
    call('HSET', PREFIX .. 'document', key, string.char(#version) .. version .. value)
  end
  return 1
end
