-- The tables of a frontier file. They are created in one transaction in an empty file.

PRAGMA application_id = 0x53686F6C;  -- "Shol"
PRAGMA user_version = 14;

-- A run and its counters: how many requests are in each state.
CREATE TABLE run (
    number INTEGER PRIMARY KEY,
    run_id TEXT NOT NULL UNIQUE,
    spider TEXT NOT NULL,
    state TEXT NOT NULL,
    created_at REAL NOT NULL,
    settings BLOB NOT NULL,                -- msgpack
    project TEXT NOT NULL,
    ended_at REAL,                         -- when it was finished or cancelled
    pushed INTEGER NOT NULL DEFAULT 0,
    ready INTEGER NOT NULL DEFAULT 0,
    waiting INTEGER NOT NULL DEFAULT 0,
    leased INTEGER NOT NULL DEFAULT 0,
    done INTEGER NOT NULL DEFAULT 0,
    dead INTEGER NOT NULL DEFAULT 0,
    duplicates INTEGER NOT NULL DEFAULT 0,
    items INTEGER NOT NULL DEFAULT 0,      -- also the last sequence number of the item log
    newest INTEGER NOT NULL DEFAULT 0,     -- the id of its last request
    incoming INTEGER NOT NULL DEFAULT 0,   -- staged links
    redirects INTEGER NOT NULL DEFAULT 0,  -- done requests that were redirects
    item_errors INTEGER NOT NULL DEFAULT 0, -- items that could not be stored
    trimmed INTEGER,                       -- how many items were deleted from the log; null: not known
    options BLOB,                          -- FrontierOptions as msgpack; null: nobody has taken part yet
    cookies INTEGER NOT NULL DEFAULT 0     -- the version of its cookies; 0: it has none
);

-- The politeness of hosts. All runs in the file share it.
CREATE TABLE host (
    name TEXT PRIMARY KEY,
    delay REAL,
    concurrency INTEGER,
    crawl_delay REAL,
    learned_delay REAL,
    blocked_until REAL NOT NULL DEFAULT 0,
    block_reason TEXT NOT NULL DEFAULT '',
    ended_at REAL NOT NULL
) WITHOUT ROWID;

-- The queue of one run for one host.
CREATE TABLE lane (
    number INTEGER PRIMARY KEY,
    run INTEGER NOT NULL,
    host TEXT NOT NULL,
    UNIQUE (run, host)
);

CREATE TABLE request (
    id INTEGER PRIMARY KEY,                -- ascending over all runs: first in, first out
    run INTEGER NOT NULL,
    lane INTEGER NOT NULL,
    state INTEGER NOT NULL DEFAULT 0,      -- 0 ready, 1 waiting, 2 leased, 3 done, 4 dead
    rank REAL NOT NULL,                    -- the negative of its priority
    due REAL,                              -- waiting: when it is ready again; leased: when the lease expires
    token INTEGER,                         -- of its current lease
    slot TEXT,                             -- the worker or cluster slot of its last lease, if it had one
    epoch INTEGER,
    begun INTEGER NOT NULL DEFAULT 1,      -- leased: 0 while the last attempt does not count yet
    origin INTEGER,                        -- leased: the token before it was reissued
    nonce BLOB,                            -- and the nonce of the reissue
    attempts INTEGER NOT NULL DEFAULT 0,
    status INTEGER NOT NULL DEFAULT 0,
    items INTEGER NOT NULL DEFAULT 0,
    at REAL NOT NULL,
    parent INTEGER,
    kind TEXT,                             -- dead: the kind of death
    reason TEXT,
    fingerprint BLOB NOT NULL,
    payload BLOB NOT NULL                  -- the Request as msgpack
);
CREATE INDEX request_ready ON request (lane, rank) WHERE state = 0;
CREATE INDEX request_due ON request (run, due) WHERE due IS NOT NULL;
CREATE INDEX request_dead ON request (run) WHERE state = 4;

-- The index over fingerprints. It lags behind: see seen.py.
CREATE TABLE seen (
    fingerprint BLOB NOT NULL,
    run INTEGER NOT NULL,
    request INTEGER NOT NULL,
    PRIMARY KEY (fingerprint, run)
) WITHOUT ROWID;

-- Up to which request each slice of the fingerprints of a run is in the index.
CREATE TABLE seen_slice (
    run INTEGER NOT NULL,
    slice INTEGER NOT NULL,
    through INTEGER NOT NULL,
    PRIMARY KEY (run, slice)
) WITHOUT ROWID;

-- Links of large pages that are done or dead, in portions. They enter the queue one portion at a time.
CREATE TABLE stage (
    id INTEGER PRIMARY KEY,                -- ascending: first in, first out
    run INTEGER NOT NULL,
    parent INTEGER NOT NULL,               -- the page
    size INTEGER NOT NULL,                 -- the number of links
    links BLOB NOT NULL                    -- the fingerprint and the Request of each, as msgpack
);

CREATE TABLE item (
    id INTEGER PRIMARY KEY,                -- the run and the sequence number in its log: see items.py
    fingerprint BLOB NOT NULL,
    position INTEGER NOT NULL,
    payload BLOB NOT NULL
);

-- Unusual events of a request: failed attempts, lost leases, notes.
CREATE TABLE event (
    id INTEGER PRIMARY KEY,
    request INTEGER NOT NULL,
    at REAL NOT NULL,
    what TEXT NOT NULL,
    detail TEXT NOT NULL,
    worker TEXT NOT NULL                   -- the slot of the lease that it is about, or empty
);
CREATE INDEX event_request ON event (request);

CREATE TABLE role (
    run INTEGER NOT NULL,
    role TEXT NOT NULL,
    token INTEGER NOT NULL,                -- 0: the role is free
    until REAL NOT NULL,
    cursor BLOB NOT NULL,
    finished INTEGER NOT NULL,
    slot TEXT,                             -- the worker or cluster slot that claimed it last, if it has a name
    epoch INTEGER,                         -- of that slot
    claim_epoch INTEGER NOT NULL DEFAULT 0,  -- of the last claim; 0: it was made before claims had epochs
    PRIMARY KEY (run, role)
) WITHOUT ROWID;

-- Cluster slots. Holders under an earlier epoch get no leases and no roles.
CREATE TABLE fence (
    run INTEGER NOT NULL,
    slot TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    PRIMARY KEY (run, slot)
) WITHOUT ROWID;

-- Small facts that all runs share, such as the rules of a robots.txt.
CREATE TABLE note (
    key TEXT PRIMARY KEY,
    value BLOB NOT NULL,
    until REAL NOT NULL
) WITHOUT ROWID;

-- Schedules, histories of runs and the like: see shoal.ports.Documents.
CREATE TABLE document (
    key TEXT PRIMARY KEY,
    version BLOB NOT NULL,                 -- random, changes with each write
    value BLOB NOT NULL
) WITHOUT ROWID;

-- The names of all roles, documents and hosts. Only the code that deletes one of them deletes its name: so an audit notices
-- a row that is lost.
CREATE TABLE inventory (
    run INTEGER NOT NULL,                  -- 0: all runs share it
    kind TEXT NOT NULL,                    -- the name of the table
    name TEXT NOT NULL,
    PRIMARY KEY (run, kind, name)
) WITHOUT ROWID;
CREATE TRIGGER role_listed AFTER INSERT ON role BEGIN
    INSERT OR IGNORE INTO inventory VALUES (new.run, 'role', new.role);
END;
CREATE TRIGGER document_listed AFTER INSERT ON document BEGIN
    INSERT OR IGNORE INTO inventory VALUES (0, 'document', new.key);
END;
CREATE TRIGGER host_listed AFTER INSERT ON host BEGIN
    INSERT OR IGNORE INTO inventory VALUES (0, 'host', new.name);
END;
