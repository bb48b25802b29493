-- Write a document if its version is the expected one. ``from``: the place in ARGV of its key, expected version ('' for none),
-- new version, 1 to write or 0 to delete, and value; to create a run with it, the arguments of create_run follow. Returns 0
-- if it has another version.
local function put_document(from)
  local key, expected, version, writes, value = unpack(arguments_from(from))
  local found = call('HGET', PREFIX .. 'document', key)
  local stored = found and sub(found, 2, 1 + string.byte(found)) or ''
  if stored == version or (writes == '0' and stored == '') then return 1 end
  if stored ~= expected then return 0 end
  if ARGV[from + 5] then create_run(from + 5) end
  if writes == '0' then
    call('ZREM', PREFIX .. 'documents', key)
    call('HDEL', PREFIX .. 'document', key)
  else
    if stored == '' then call('ZADD', PREFIX .. 'documents', 0, key) end
    call('HSET', PREFIX .. 'document', key, string.char(#version) .. version .. value)
  end
  return 1
end
