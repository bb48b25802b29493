-- Write a document with cookies of the run: see put_document. Returns the new version of the run's cookies, which each lease
-- answers with; 0 if the document has another version.

if put_document(5) == 0 then return 0 end
return call('INCR', own.key .. ':cookies')
