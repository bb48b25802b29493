-- Write a document: see put_document. Returns 0 if it has another version.

return put_document(10, unpack(ARGV, 5, 9))
