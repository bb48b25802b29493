-- The names of all roles, documents and rewinds, and of the hosts with settings. Only the functions that delete one of them delete its
-- name: so an audit notices a row that is lost.
CREATE TABLE inventory (
    run integer NOT NULL,                     -- 0: all runs share it
    kind text NOT NULL,                       -- the name of the table
    name text COLLATE "C" NOT NULL,
    PRIMARY KEY (run, kind, name)
);
INSERT INTO inventory (run, kind, name)
    SELECT r.run, 'role', r.role FROM role r
    UNION ALL SELECT w.run, 'rewind', w.id::text FROM rewind w
    UNION ALL SELECT 0, 'document', convert_from(d.key, 'UTF8') FROM document d
    UNION ALL SELECT 0, 'host', h.name FROM host h
        WHERE num_nonnulls(h.delay, h.concurrency, h.crawl_delay, h.learned_delay) > 0 OR h.blocked_until > 0;
