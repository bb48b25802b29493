-- Write a document: see put_document. Returns 0 if it has another version.

return put_document(5)
