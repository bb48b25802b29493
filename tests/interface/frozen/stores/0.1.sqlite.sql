BEGIN TRANSACTION;
CREATE TABLE document (
    key TEXT PRIMARY KEY,
    version BLOB NOT NULL,                 -- random, changes with each write
    value BLOB NOT NULL
) WITHOUT ROWID;
INSERT INTO "document" VALUES('run/frozen/jar//shop.example',X'76657273696F6E31',X'636F6F6B696573');
INSERT INTO "document" VALUES('schedule/daily',X'76657273696F6E31',X'646F63756D656E74');
CREATE TABLE event (
    id INTEGER PRIMARY KEY,
    request INTEGER NOT NULL,
    at REAL NOT NULL,
    what TEXT NOT NULL,
    detail TEXT NOT NULL,
    worker TEXT NOT NULL                   -- the slot of the lease that it is about, or empty
);
INSERT INTO "event" VALUES(1,2,1.79501006795819878581e+09,'failed 1','no such name','');
CREATE TABLE fence (
    run INTEGER NOT NULL,
    slot TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    PRIMARY KEY (run, slot)
) WITHOUT ROWID;
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
INSERT INTO "host" VALUES('shop.example',0.25,NULL,NULL,NULL,0.0,'',1.79501006795819878581e+09);
CREATE TABLE inventory (
    run INTEGER NOT NULL,                  -- 0: all runs share it
    kind TEXT NOT NULL,                    -- the name of the table
    name TEXT NOT NULL,
    PRIMARY KEY (run, kind, name)
) WITHOUT ROWID;
INSERT INTO "inventory" VALUES(0,'document','run/frozen/jar//shop.example');
INSERT INTO "inventory" VALUES(0,'document','schedule/daily');
INSERT INTO "inventory" VALUES(0,'host','shop.example');
INSERT INTO "inventory" VALUES(1,'role','sink:books.jsonl');
CREATE TABLE item (
    id INTEGER PRIMARY KEY,                -- the run and the sequence number in its log: see items.py
    fingerprint BLOB NOT NULL,
    position INTEGER NOT NULL,
    payload BLOB NOT NULL
);
INSERT INTO "item" VALUES(1099511627777,X'4C6B92B8A8161160FD41910C4E962227',0,X'6F6E65');
INSERT INTO "item" VALUES(1099511627778,X'4C6B92B8A8161160FD41910C4E962227',1,X'74776F');
CREATE TABLE lane (
    number INTEGER PRIMARY KEY,
    run INTEGER NOT NULL,
    host TEXT NOT NULL,
    UNIQUE (run, host)
);
INSERT INTO "lane" VALUES(1,1,'shop.example');
CREATE TABLE note (
    key TEXT PRIMARY KEY,
    value BLOB NOT NULL,
    until REAL NOT NULL
) WITHOUT ROWID;
INSERT INTO "note" VALUES('robots shop.example',X'66616374',2.11037006795866322527e+09);
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
INSERT INTO "request" VALUES(1,1,1,3,0.0,NULL,1752103014688948225,NULL,NULL,1,NULL,NULL,1,0,2,1795010067.95795,NULL,NULL,NULL,X'4C6B92B8A8161160FD41910C4E962227',X'DE0001A375726CB5687474703A2F2F73686F702E6578616D706C652F30');
INSERT INTO "request" VALUES(2,1,1,4,0.0,NULL,NULL,NULL,NULL,1,NULL,NULL,1,0,0,1.79501006795819878581e+09,NULL,'dns','no such name',X'3CBAB5BF46F843126029540A14BEB751',X'DE0001A375726CB5687474703A2F2F73686F702E6578616D706C652F31');
INSERT INTO "request" VALUES(3,1,1,0,0.0,NULL,NULL,NULL,NULL,1,NULL,NULL,0,0,0,1.79501006795834684368e+09,NULL,NULL,NULL,X'40ED616AA7614733D35CB9A0AB9230C5',X'DE0001A375726CB5687474703A2F2F73686F702E6578616D706C652F32');
INSERT INTO "request" VALUES(4,1,1,0,0.0,NULL,NULL,NULL,NULL,1,NULL,NULL,0,0,0,1.79501006795736980439e+09,NULL,NULL,NULL,X'97DAED86BB08DF1B62F564FE5DF3B2E3',X'DE0001A375726CB5687474703A2F2F73686F702E6578616D706C652F33');
INSERT INTO "request" VALUES(5,1,1,0,0.0,NULL,NULL,NULL,NULL,1,NULL,NULL,0,0,0,1.79501006795736980439e+09,NULL,NULL,NULL,X'C10EAB8717F3A39B0C0AB0E18F4E149A',X'DE0001A375726CB5687474703A2F2F73686F702E6578616D706C652F34');
INSERT INTO "request" VALUES(6,1,1,0,0.0,NULL,NULL,NULL,NULL,1,NULL,NULL,0,0,0,1795010067.95795,1,NULL,NULL,X'3B64093AD221D57BA31D3C75137CC358',X'DE0001A375726CB9687474703A2F2F73686F702E6578616D706C652F6368696C64');
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
INSERT INTO "role" VALUES(1,'sink:books.jsonl',0,0.0,X'637572736F72',0,NULL,NULL,1795010067958421);
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
    options BLOB                           -- FrontierOptions as msgpack; null: nobody has taken part yet
);
INSERT INTO "run" VALUES(1,'frozen','books','running',1790000000.0,X'80','shoal',NULL,6,4,0,0,1,1,0,2,6,0,0,0,0,X'87AC6D61785F617474656D70747302A564656C6179CB0000000000000000B4636F6E63757272656E63795F7065725F686F737464A6776569676874CB3FF0000000000000AE6D61785F71756575655F73697A65C0A86F766572666C6F77A6616363657074A9696E5F6D656D6F7279CE000186A0');
CREATE TABLE seen (
    fingerprint BLOB NOT NULL,
    run INTEGER NOT NULL,
    request INTEGER NOT NULL,
    PRIMARY KEY (fingerprint, run)
) WITHOUT ROWID;
CREATE TABLE seen_slice (
    run INTEGER NOT NULL,
    slice INTEGER NOT NULL,
    through INTEGER NOT NULL,
    PRIMARY KEY (run, slice)
) WITHOUT ROWID;
CREATE TABLE stage (
    id INTEGER PRIMARY KEY,                -- ascending: first in, first out
    run INTEGER NOT NULL,
    parent INTEGER NOT NULL,               -- the page
    size INTEGER NOT NULL,                 -- the number of links
    links BLOB NOT NULL                    -- the fingerprint and the Request of each, as msgpack
);
CREATE INDEX request_ready ON request (lane, rank) WHERE state = 0;
CREATE INDEX request_due ON request (run, due) WHERE due IS NOT NULL;
CREATE INDEX request_dead ON request (run) WHERE state = 4;
CREATE INDEX event_request ON event (request);
CREATE TRIGGER role_listed AFTER INSERT ON role BEGIN
    INSERT OR IGNORE INTO inventory VALUES (new.run, 'role', new.role);
END;
CREATE TRIGGER document_listed AFTER INSERT ON document BEGIN
    INSERT OR IGNORE INTO inventory VALUES (0, 'document', new.key);
END;
CREATE TRIGGER host_listed AFTER INSERT ON host BEGIN
    INSERT OR IGNORE INTO inventory VALUES (0, 'host', new.name);
END;
COMMIT;
PRAGMA user_version = 13;
PRAGMA application_id = 1399353196;
