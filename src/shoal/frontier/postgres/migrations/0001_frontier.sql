-- The tables of a frontier.
--
-- They are split by how often their rows change. A request is written once, so the large index over fingerprints is never
-- updated. The state of a request is a small row in `ready`, then in `held`, then in `outcome`.
--
-- Rows are locked in this order, and within a table by the key, to avoid deadlocks: role, held, new hosts by name,
-- fingerprints, host, lane, ledger. With a limit for links, room_for_links() takes its lock after the role.
--
-- Columns named `at` are seconds since 1970, for people. All other times are those of `clock()`, which never goes back.
--
-- Clients choose the tokens of leases and roles at random, so they never repeat, not even in a restored backup.

CREATE SEQUENCE batch;                        -- numbers batches of requests

CREATE TABLE run (
    -- Random: in a restored backup, a new run must not get the number of a lost one, which clients may still use.
    id integer PRIMARY KEY DEFAULT 1 + floor(random() * 2147483646)::integer,
    number bigint GENERATED ALWAYS AS IDENTITY,  -- order of creation
    run_id text NOT NULL UNIQUE,
    spider text NOT NULL,
    state text NOT NULL,
    created_at double precision NOT NULL,
    settings bytea NOT NULL,                  -- msgpack
    project text NOT NULL,
    ended_at double precision,                -- when it was finished or cancelled
    -- Options of its workers. Other runs need them to requeue its lost leases and to place its lanes.
    max_attempts integer NOT NULL DEFAULT 3,
    delay double precision NOT NULL DEFAULT 0,
    concurrency integer NOT NULL DEFAULT 8,
    link_limit bigint,                        -- the queue size at which links are refused; null: no limit
    deleting boolean NOT NULL DEFAULT false   -- hidden, and partly deleted
);

-- How often idle clients poll, from a sample: see spread_polls().
CREATE TABLE poll_state (
    id integer PRIMARY KEY,
    since double precision NOT NULL,          -- start of the window
    polls double precision NOT NULL,          -- in the window so far
    poll_after double precision NOT NULL      -- the current answer
) WITH (fillfactor = 10, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0);
INSERT INTO poll_state (id, since, polls, poll_after) VALUES (1, 0, 0, 0);

-- How many requests of a run are in each state. Locked last and until the commit, so that numbers of the item log become
-- visible in order.
CREATE TABLE ledger (
    run integer PRIMARY KEY,
    pushed bigint NOT NULL DEFAULT 0,
    ready bigint NOT NULL DEFAULT 0,
    waiting bigint NOT NULL DEFAULT 0,
    leased bigint NOT NULL DEFAULT 0,
    done bigint NOT NULL DEFAULT 0,
    dead bigint NOT NULL DEFAULT 0,
    duplicates bigint NOT NULL DEFAULT 0,
    items bigint NOT NULL DEFAULT 0,          -- also the last number of the item log
    incoming bigint NOT NULL DEFAULT 0        -- staged links
) WITH (fillfactor = 20, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0,
        autovacuum_vacuum_cost_delay = 0);

-- All runs of a store share the politeness to hosts.
CREATE TABLE host (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text COLLATE "C" NOT NULL UNIQUE,
    delay double precision,
    concurrency integer,
    crawl_delay double precision,
    learned_delay double precision,
    blocked_until double precision NOT NULL DEFAULT 0,
    block_reason text NOT NULL DEFAULT '',
    in_flight integer NOT NULL DEFAULT 0,
    ended_at double precision NOT NULL DEFAULT 0   -- end of the last fetch; of host 0: the last rewind of the store
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);

-- Defaults for all hosts.
INSERT INTO host (id, name) OVERRIDING SYSTEM VALUE VALUES (0, '*');

-- The queue of one run for one host. Its place changes only under the lock of the host, except that anyone may open it: a
-- lease checks the host again. It is created with its first request. An open lane changes with each lease, so it is in few
-- indexes: its key is computed, not looked up.
CREATE TABLE lane (
    id bigint PRIMARY KEY,                    -- lane_key(run, host); a generated column costs more with each change
    best_rank double precision,               -- of its best ready request
    best_id bigint,
    due double precision,                     -- when to open it (2) or to check it again (3)
    run integer NOT NULL,
    host integer NOT NULL,
    ready integer NOT NULL,
    place smallint NOT NULL                   -- 0 empty, 1 open, 2 waits until `due`, 3 its host is full
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX lane_open ON lane (run, best_rank, best_id) WHERE place = 1;
CREATE INDEX lane_again ON lane (run, place, due) WHERE place > 1;
CREATE INDEX lane_blocked ON lane (host, place, due) WHERE place > 1;

CREATE TABLE request (
    id bigint PRIMARY KEY,                    -- ascending, so first in, first out
    parent bigint,
    rank double precision,                    -- the negative of its priority; null: 0
    run integer NOT NULL,
    host integer NOT NULL,
    fingerprint bytea NOT NULL,
    url text NOT NULL,
    payload bytea NOT NULL                    -- the Request as msgpack, without its URL: see columns.py
);
CREATE UNIQUE INDEX request_fingerprint ON request (run, fingerprint);

CREATE TABLE ready (
    rank double precision NOT NULL,
    id bigint NOT NULL,
    at double precision NOT NULL,
    lane bigint NOT NULL,
    attempts integer,                         -- these are null until its first attempt
    status integer,
    items integer,
    PRIMARY KEY (lane, rank, id)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);

CREATE TABLE held (
    token bigint PRIMARY KEY,
    id bigint NOT NULL,
    rank double precision NOT NULL,
    due double precision NOT NULL,            -- when it is lost (leased) or ready again (waiting)
    at double precision NOT NULL,
    run integer NOT NULL,
    host integer NOT NULL,
    attempts integer NOT NULL,
    status integer NOT NULL,
    items integer NOT NULL,
    state smallint NOT NULL,                  -- 1 waiting, 2 leased
    worker integer NOT NULL,                  -- the number of its holder; 0: none
    begun boolean NOT NULL,                   -- else its last attempt does not count yet
    epoch bigint,
    fingerprint bytea NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX held_due ON held (run, due);
CREATE INDEX held_overdue ON held (due);

-- Its columns are ordered by size, and none is null: so a row has no padding and no bitmap.
CREATE TABLE outcome (
    id bigint PRIMARY KEY,
    token bigint NOT NULL,                    -- of the lease that ended so
    at double precision NOT NULL,
    run integer NOT NULL,
    items integer NOT NULL,
    worker integer NOT NULL,                  -- the number of the holder of that lease; 0: none
    seconds real NOT NULL,                    -- how long it was leased
    status smallint NOT NULL,
    attempts smallint NOT NULL,
    state smallint NOT NULL,                  -- 3 done, 4 dead
    kind text NOT NULL,                       -- why it is dead, or empty
    reason text NOT NULL
);
CREATE INDEX outcome_dead ON outcome (run, id) WHERE state = 4;

CREATE TABLE item (
    run integer NOT NULL,
    position integer NOT NULL,
    seq bigint NOT NULL,
    token bigint NOT NULL,                    -- of the lease of its page
    fingerprint bytea NOT NULL,
    payload bytea NOT NULL,
    PRIMARY KEY (run, seq)
);

-- Unusual events of a request: failed attempts, lost leases, notes.
CREATE TABLE event (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    request bigint NOT NULL,
    at double precision NOT NULL,
    worker integer NOT NULL,                  -- the number of the holder of its lease; 0: none
    what text NOT NULL,
    detail text NOT NULL
);
CREATE INDEX event_request ON event (request);

CREATE TABLE role (
    run integer NOT NULL,
    role text NOT NULL,
    token bigint NOT NULL,                    -- 0: not held
    until double precision NOT NULL,
    cursor bytea NOT NULL,
    finished boolean NOT NULL,
    slot text,
    epoch bigint,
    PRIMARY KEY (run, role)
) WITH (fillfactor = 50);

-- Workers and slots of clusters that have leased something or were fenced. Rows of requests name them by number.
CREATE TABLE holder (
    run integer NOT NULL,
    number integer NOT NULL,                  -- from 1
    name text NOT NULL,
    epoch bigint,                             -- of its last fence: earlier ones get nothing more
    PRIMARY KEY (run, name),
    UNIQUE (run, number)
);

-- The links of a very large page. They are uploaded in chunks under the token of its lease. The completion of the page
-- registers its stage; then clients move chunk after chunk into the queue.
CREATE TABLE stage (
    token bigint PRIMARY KEY,
    run integer NOT NULL,
    parent bigint NOT NULL,
    remaining integer NOT NULL,               -- links that are not in the queue yet
    added integer NOT NULL DEFAULT 0,         -- new links that are in the queue
    refused integer NOT NULL DEFAULT 0        -- new links that found it full
);
CREATE INDEX stage_open ON stage (run, token) WHERE remaining > 0;

CREATE TABLE chunk (
    token bigint NOT NULL,
    number integer NOT NULL,
    run integer NOT NULL,
    size integer NOT NULL,
    hosts text[] NOT NULL,
    fingerprints bytea[] NOT NULL,
    host integer[] NOT NULL,
    ranks double precision[] NOT NULL,
    urls text[] NOT NULL,
    payloads bytea[] NOT NULL,
    PRIMARY KEY (token, number)
);
CREATE INDEX chunk_run ON chunk (run);

-- Rewinds of the store that clients of a run noticed.
CREATE TABLE rewind (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run integer NOT NULL,
    noticed double precision NOT NULL,
    at double precision NOT NULL,
    lost_seconds double precision
);
CREATE INDEX rewind_run ON rewind (run, id);

-- Small facts that all runs share.
CREATE TABLE note (
    key bytea PRIMARY KEY,
    until double precision NOT NULL,
    value bytea NOT NULL
);
CREATE INDEX note_until ON note (until);

-- Schedules, histories of runs and the like: see shoal.ports.Documents.
CREATE TABLE document (
    key bytea PRIMARY KEY,
    version bytea NOT NULL,                   -- random, changes with each write
    value bytea NOT NULL
);

-- Workers of a run that send heartbeats.
CREATE TABLE worker (
    run integer NOT NULL,
    name text NOT NULL,                       -- it leases under a slot of this name
    epoch bigint NOT NULL,
    session double precision NOT NULL,
    beat_at double precision NOT NULL,        -- time of its last heartbeat
    pid integer NOT NULL,
    machine text NOT NULL,
    PRIMARY KEY (run, name)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0);

-- Heartbeats of all workers of a run together. Within a gap, the store may have been away.
CREATE TABLE heard (
    run integer PRIMARY KEY,
    at double precision NOT NULL,             -- time of the last heartbeat
    since double precision NOT NULL           -- since when they came without a long gap
) WITH (fillfactor = 10, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0);

-- The requests of all runs, for people and their tools. No row of a union can be changed, so the view is read-only. Times of
-- claims are those of the server.
CREATE VIEW url_work_queue AS
    SELECT q.url, s.status, w.name AS worker_id, to_timestamp(s.claimed_at) AS claimed_at,
        greatest(s.attempts - 1, 0) AS retry_count, r.run_id
    FROM (
        SELECT y.id, 'pending' AS status, 0 AS worker, NULL::double precision AS claimed_at, y.attempts FROM ready y
        UNION ALL
        SELECT h.id, 'pending', 0, NULL, h.attempts FROM held h WHERE h.state = 1
        UNION ALL
        SELECT h.id, 'claimed', h.worker, h.at, h.attempts - (NOT h.begun)::integer FROM held h WHERE h.state = 2
        UNION ALL
        SELECT o.id, CASE o.state WHEN 3 THEN 'completed' ELSE 'failed' END, o.worker,
            CASE WHEN o.attempts > 0 THEN o.at - o.seconds END, o.attempts
            FROM outcome o  -- without an attempt: a link that was refused
    ) s
    JOIN request q ON q.id = s.id
    JOIN run r ON r.id = q.run AND NOT r.deleting
    LEFT JOIN holder w ON w.run = q.run AND w.number = s.worker;
