\restrict bNBn980nlrAX6kUutcEYbuB5lXbCV4c77hRP8SQChRbPAq9Oij3hflF4IDUN8RQ
SET statement_timeout = 0;
SET lock_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SET client_encoding = 'UTF8';
SET standard_conforming_strings = on;
SELECT pg_catalog.set_config('search_path', '', false);
SET check_function_bodies = false;
SET xmloption = content;
SET client_min_messages = warning;
SET row_security = off;
CREATE SCHEMA shoal;
CREATE SEQUENCE shoal.batch
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
SET default_tablespace = '';
SET default_table_access_method = heap;
CREATE TABLE shoal.chunk (
    token bigint NOT NULL,
    number integer NOT NULL,
    run integer NOT NULL,
    size integer NOT NULL,
    hosts text[] NOT NULL,
    fingerprints bytea[] NOT NULL,
    host integer[] NOT NULL,
    ranks double precision[] NOT NULL,
    urls text[] NOT NULL,
    payloads bytea[] NOT NULL
);
CREATE TABLE shoal.clock_state (
    id integer NOT NULL,
    seen double precision NOT NULL,
    skew double precision NOT NULL,
    boot timestamp with time zone
)
WITH (fillfactor='10', autovacuum_vacuum_threshold='1000', autovacuum_vacuum_scale_factor='0');
CREATE TABLE shoal.cookie_version (
    run integer NOT NULL,
    version bigint NOT NULL
)
WITH (fillfactor='10', autovacuum_vacuum_threshold='1000', autovacuum_vacuum_scale_factor='0');
CREATE TABLE shoal.document (
    key bytea NOT NULL,
    version bytea NOT NULL,
    value bytea NOT NULL
);
CREATE TABLE shoal.event (
    id bigint NOT NULL,
    request bigint NOT NULL,
    at double precision NOT NULL,
    worker integer NOT NULL,
    what text NOT NULL,
    detail text NOT NULL
);
ALTER TABLE shoal.event ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME shoal.event_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE shoal.functions (
    name text NOT NULL,
    component text NOT NULL,
    version integer NOT NULL,
    at timestamp with time zone DEFAULT now() NOT NULL
);
CREATE TABLE shoal.heard (
    session double precision NOT NULL,
    at double precision NOT NULL,
    since double precision NOT NULL
)
WITH (fillfactor='10', autovacuum_vacuum_threshold='1000', autovacuum_vacuum_scale_factor='0');
CREATE TABLE shoal.held (
    token bigint NOT NULL,
    id bigint NOT NULL,
    rank double precision NOT NULL,
    due double precision NOT NULL,
    at double precision NOT NULL,
    run integer NOT NULL,
    host integer NOT NULL,
    attempts integer NOT NULL,
    status integer NOT NULL,
    items integer NOT NULL,
    state smallint NOT NULL,
    worker integer NOT NULL,
    begun boolean NOT NULL,
    epoch bigint,
    fingerprint bytea NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_threshold='5000', autovacuum_vacuum_cost_delay='0');
CREATE TABLE shoal.holder (
    run integer NOT NULL,
    number integer NOT NULL,
    name text NOT NULL,
    epoch bigint
);
CREATE TABLE shoal.host (
    id integer NOT NULL,
    name text NOT NULL COLLATE pg_catalog."C",
    delay double precision,
    concurrency integer,
    crawl_delay double precision,
    learned_delay double precision,
    blocked_until double precision DEFAULT 0 NOT NULL,
    block_reason text DEFAULT ''::text NOT NULL,
    in_flight integer DEFAULT 0 NOT NULL,
    ended_at double precision DEFAULT 0 NOT NULL,
    last_run integer,
    shared boolean DEFAULT false NOT NULL,
    longest double precision
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0.05', autovacuum_vacuum_cost_delay='0');
ALTER TABLE shoal.host ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME shoal.host_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE shoal.inventory (
    run integer NOT NULL,
    kind text NOT NULL,
    name text NOT NULL COLLATE pg_catalog."C"
);
CREATE TABLE shoal.item (
    run integer NOT NULL,
    "position" integer NOT NULL,
    seq bigint NOT NULL,
    token bigint NOT NULL,
    fingerprint bytea NOT NULL,
    payload bytea NOT NULL
);
CREATE TABLE shoal.lane (
    id bigint NOT NULL,
    best_rank double precision,
    best_id bigint,
    due double precision,
    run integer NOT NULL,
    host integer NOT NULL,
    ready integer NOT NULL,
    place smallint NOT NULL
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0.05', autovacuum_vacuum_cost_delay='0');
CREATE TABLE shoal.ledger (
    run integer NOT NULL,
    pushed bigint DEFAULT 0 NOT NULL,
    ready bigint DEFAULT 0 NOT NULL,
    waiting bigint DEFAULT 0 NOT NULL,
    leased bigint DEFAULT 0 NOT NULL,
    done bigint DEFAULT 0 NOT NULL,
    dead bigint DEFAULT 0 NOT NULL,
    duplicates bigint DEFAULT 0 NOT NULL,
    items bigint DEFAULT 0 NOT NULL,
    incoming bigint DEFAULT 0 NOT NULL,
    redirects bigint DEFAULT 0 NOT NULL,
    item_errors bigint DEFAULT 0 NOT NULL,
    trimmed bigint
)
WITH (fillfactor='20', autovacuum_vacuum_threshold='1000', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_cost_delay='0');
CREATE TABLE shoal.migration (
    component text NOT NULL,
    number integer NOT NULL,
    name text NOT NULL,
    at timestamp with time zone DEFAULT now() NOT NULL,
    digest text
);
CREATE TABLE shoal.note (
    key bytea NOT NULL,
    until double precision NOT NULL,
    value bytea NOT NULL
);
CREATE TABLE shoal.outcome (
    id bigint NOT NULL,
    token bigint NOT NULL,
    at double precision NOT NULL,
    run integer NOT NULL,
    items integer NOT NULL,
    worker integer NOT NULL,
    seconds real NOT NULL,
    status smallint NOT NULL,
    attempts smallint NOT NULL,
    state smallint NOT NULL,
    kind text NOT NULL,
    reason text NOT NULL
);
CREATE TABLE shoal.poll_state (
    id integer NOT NULL,
    since double precision NOT NULL,
    polls double precision NOT NULL,
    poll_after double precision NOT NULL
)
WITH (fillfactor='10', autovacuum_vacuum_threshold='1000', autovacuum_vacuum_scale_factor='0');
CREATE TABLE shoal.presence (
    run integer NOT NULL,
    called double precision NOT NULL,
    asked double precision NOT NULL,
    until double precision NOT NULL
)
WITH (fillfactor='10', autovacuum_vacuum_threshold='1000', autovacuum_vacuum_scale_factor='0');
CREATE TABLE shoal.ready (
    rank double precision NOT NULL,
    id bigint NOT NULL,
    at double precision NOT NULL,
    lane bigint NOT NULL,
    attempts integer,
    status integer,
    items integer
)
WITH (autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_threshold='5000', autovacuum_vacuum_cost_delay='0');
CREATE TABLE shoal.request (
    id bigint NOT NULL,
    parent bigint,
    rank double precision,
    run integer NOT NULL,
    host integer NOT NULL,
    fingerprint bytea NOT NULL,
    url text NOT NULL,
    payload bytea NOT NULL
);
CREATE TABLE shoal.rewind (
    id bigint NOT NULL,
    run integer NOT NULL,
    noticed double precision NOT NULL,
    at double precision NOT NULL,
    lost_seconds double precision
);
ALTER TABLE shoal.rewind ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME shoal.rewind_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE shoal.role (
    run integer NOT NULL,
    role text NOT NULL,
    token bigint NOT NULL,
    until double precision NOT NULL,
    cursor bytea NOT NULL,
    finished boolean NOT NULL,
    slot text,
    epoch bigint,
    claim_epoch bigint DEFAULT 0 NOT NULL
)
WITH (fillfactor='50');
CREATE TABLE shoal.run (
    id integer DEFAULT (1 + (floor((random() * (2147483646)::double precision)))::integer) NOT NULL,
    number bigint NOT NULL,
    run_id text NOT NULL,
    spider text NOT NULL,
    state text NOT NULL,
    created_at double precision NOT NULL,
    settings bytea NOT NULL,
    project text NOT NULL,
    ended_at double precision,
    max_attempts integer DEFAULT 3 NOT NULL,
    delay double precision DEFAULT 0 NOT NULL,
    concurrency integer DEFAULT 8 NOT NULL,
    link_limit bigint,
    deleting boolean DEFAULT false NOT NULL,
    weight double precision DEFAULT 1 NOT NULL
);
ALTER TABLE shoal.run ALTER COLUMN number ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME shoal.run_number_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE shoal.stage (
    token bigint NOT NULL,
    run integer NOT NULL,
    parent bigint NOT NULL,
    remaining integer NOT NULL,
    added integer DEFAULT 0 NOT NULL,
    refused integer DEFAULT 0 NOT NULL
);
CREATE TABLE shoal.turn (
    host integer NOT NULL,
    run integer NOT NULL,
    used double precision NOT NULL,
    seen double precision NOT NULL
)
WITH (fillfactor='50', autovacuum_vacuum_threshold='1000', autovacuum_vacuum_scale_factor='0');
CREATE VIEW shoal.url_work_queue AS
 SELECT q.url,
    s.status,
    w.name AS worker_id,
    to_timestamp(s.claimed_at) AS claimed_at,
    GREATEST((s.attempts - 1), 0) AS retry_count,
    r.run_id
   FROM (((( SELECT y.id,
            'pending'::text AS status,
            0 AS worker,
            NULL::double precision AS claimed_at,
            y.attempts
           FROM shoal.ready y
        UNION ALL
         SELECT h.id,
            'pending'::text,
            0,
            NULL::double precision,
            h.attempts
           FROM shoal.held h
          WHERE (h.state = 1)
        UNION ALL
         SELECT h.id,
            'claimed'::text,
            h.worker,
            h.at,
            (h.attempts - ((NOT h.begun))::integer)
           FROM shoal.held h
          WHERE (h.state = 2)
        UNION ALL
         SELECT o.id,
                CASE o.state
                    WHEN 3 THEN 'completed'::text
                    ELSE 'failed'::text
                END AS "case",
            o.worker,
                CASE
                    WHEN (o.attempts > 0) THEN (o.at - o.seconds)
                    ELSE NULL::double precision
                END AS "case",
            o.attempts
           FROM shoal.outcome o) s
     JOIN shoal.request q ON ((q.id = s.id)))
     JOIN shoal.run r ON (((r.id = q.run) AND (NOT r.deleting))))
     LEFT JOIN shoal.holder w ON (((w.run = q.run) AND (w.number = s.worker))));
CREATE TABLE shoal.worker (
    run integer NOT NULL,
    name text NOT NULL,
    epoch bigint NOT NULL,
    session double precision NOT NULL,
    beat_at double precision NOT NULL,
    pid integer NOT NULL,
    machine text NOT NULL
)
WITH (fillfactor='50', autovacuum_vacuum_threshold='1000', autovacuum_vacuum_scale_factor='0');
INSERT INTO shoal.clock_state VALUES (1, 1795010070.353415, 0, '2026-11-18 13:54:29.920682+00');
INSERT INTO shoal.cookie_version VALUES (2097758716, 1);
INSERT INTO shoal.document VALUES ('\x72756e2f66726f7a656e2f6a61722f2f73686f702e6578616d706c65', '\x76657273696f6e31', '\x636f6f6b696573');
INSERT INTO shoal.document VALUES ('\x7363686564756c652f6461696c79', '\x76657273696f6e31', '\x646f63756d656e74');
INSERT INTO shoal.event OVERRIDING SYSTEM VALUE VALUES (1, 16777218, 1795010070.362776, 0, 'failed 1', 'no such name');
INSERT INTO shoal.functions VALUES ('shoal_frontier3_53729d31a5', 'frontier', 3, '2026-11-18 13:54:30.214993+00');
INSERT INTO shoal.host OVERRIDING SYSTEM VALUE VALUES (0, '*', NULL, NULL, NULL, NULL, 0, '', 0, 0, NULL, false, NULL);
INSERT INTO shoal.host OVERRIDING SYSTEM VALUE VALUES (1, 'shop.example', 0.25, NULL, NULL, NULL, 0, '', 0, 1795010070.362776, 2097758716, false, NULL);
INSERT INTO shoal.inventory VALUES (0, 'document', 'run/frozen/jar//shop.example');
INSERT INTO shoal.inventory VALUES (2097758716, 'role', 'sink:books.jsonl');
INSERT INTO shoal.inventory VALUES (0, 'document', 'schedule/daily');
INSERT INTO shoal.inventory VALUES (0, 'host', 'shop.example');
INSERT INTO shoal.item VALUES (2097758716, 0, 1, 9089154398454808577, '\x4c6b92b8a8161160fd41910c4e962227', '\x6f6e65');
INSERT INTO shoal.item VALUES (2097758716, 1, 2, 9089154398454808577, '\x4c6b92b8a8161160fd41910c4e962227', '\x74776f');
INSERT INTO shoal.lane VALUES (9009805080118951937, 0, 16777219, 1795010070.612776, 2097758716, 1, 4, 2);
INSERT INTO shoal.ledger VALUES (2097758716, 6, 4, 0, 0, 1, 1, 0, 2, 0, 0, 0, 0);
INSERT INTO shoal.migration VALUES ('clock', 1, '0001_clock.sql', '2026-11-18 13:54:30.214993+00', '47e645e9871d091c');
INSERT INTO shoal.migration VALUES ('frontier', 1, '0001_frontier.sql', '2026-11-18 13:54:30.214993+00', '00624c853f18c97a');
INSERT INTO shoal.migration VALUES ('frontier', 2, '0002_claim_epochs.sql', '2026-11-18 13:54:30.214993+00', '619e7d08ddd34079');
INSERT INTO shoal.migration VALUES ('frontier', 3, '0003_outcome_counters.sql', '2026-11-18 13:54:30.214993+00', '7a68daff8b5cde91');
INSERT INTO shoal.migration VALUES ('frontier', 4, '0004_trimmed_items.sql', '2026-11-18 13:54:30.214993+00', '7f06edd29514c687');
INSERT INTO shoal.migration VALUES ('frontier', 5, '0005_store_wide_sessions.sql', '2026-11-18 13:54:30.214993+00', 'f494a364f0a5a0e4');
INSERT INTO shoal.migration VALUES ('frontier', 6, '0006_turns.sql', '2026-11-18 13:54:30.214993+00', '83e5e08aaddc11b0');
INSERT INTO shoal.migration VALUES ('frontier', 7, '0007_inventory.sql', '2026-11-18 13:54:30.214993+00', '90e41b0348f93c4f');
INSERT INTO shoal.migration VALUES ('frontier', 8, '0008_cookie_versions.sql', '2026-11-18 13:54:30.214993+00', 'c08fd14aaa888358');
INSERT INTO shoal.note VALUES ('\x726f626f74732073686f702e6578616d706c65', 2110370070.368077, '\x66616374');
INSERT INTO shoal.outcome VALUES (16777217, 9089154398454808577, 1795010070.360686, 2097758716, 2, 0, 0.0059859753, 0, 1, 3, '', '');
INSERT INTO shoal.outcome VALUES (16777218, 9089154398454808578, 1795010070.362776, 2097758716, 0, 0, 0.0080759525, 0, 1, 4, 'dns', 'no such name');
INSERT INTO shoal.poll_state VALUES (1, 0, 0, 0);
INSERT INTO shoal.ready VALUES (0, 16777220, 1795010070.347021, 9009805080118951937, NULL, NULL, NULL);
INSERT INTO shoal.ready VALUES (0, 16777221, 1795010070.347021, 9009805080118951937, NULL, NULL, NULL);
INSERT INTO shoal.ready VALUES (0, 33554433, 1795010070.360686, 9009805080118951937, NULL, NULL, NULL);
INSERT INTO shoal.ready VALUES (0, 16777219, 1795010070.364136, 9009805080118951937, 0, 0, 0);
INSERT INTO shoal.request VALUES (16777218, NULL, NULL, 2097758716, 1, '\x3cbab5bf46f843126029540a14beb751', 'http://shop.example/1', '\xde0001');
INSERT INTO shoal.request VALUES (16777219, NULL, NULL, 2097758716, 1, '\x40ed616aa7614733d35cb9a0ab9230c5', 'http://shop.example/2', '\xde0001');
INSERT INTO shoal.request VALUES (16777217, NULL, NULL, 2097758716, 1, '\x4c6b92b8a8161160fd41910c4e962227', 'http://shop.example/0', '\xde0001');
INSERT INTO shoal.request VALUES (16777220, NULL, NULL, 2097758716, 1, '\x97daed86bb08df1b62f564fe5df3b2e3', 'http://shop.example/3', '\xde0001');
INSERT INTO shoal.request VALUES (16777221, NULL, NULL, 2097758716, 1, '\xc10eab8717f3a39b0c0ab0e18f4e149a', 'http://shop.example/4', '\xde0001');
INSERT INTO shoal.request VALUES (33554433, 16777217, NULL, 2097758716, 1, '\x3b64093ad221d57ba31d3c75137cc358', 'http://shop.example/child', '\xde0001');
INSERT INTO shoal.role VALUES (2097758716, 'sink:books.jsonl', 0, 0, '\x637572736f72', false, NULL, NULL, 1795010070366385);
INSERT INTO shoal.run OVERRIDING SYSTEM VALUE VALUES (2097758716, 1, 'frozen', 'books', 'running', 1790000000, '\x80', 'shoal', NULL, 2, 0, 100, NULL, false, 1);
SELECT pg_catalog.setval('shoal.batch', 2, true);
SELECT pg_catalog.setval('shoal.event_id_seq', 1, true);
SELECT pg_catalog.setval('shoal.host_id_seq', 1, true);
SELECT pg_catalog.setval('shoal.rewind_id_seq', 1, false);
SELECT pg_catalog.setval('shoal.run_number_seq', 1, true);
ALTER TABLE ONLY shoal.chunk
    ADD CONSTRAINT chunk_pkey PRIMARY KEY (token, number);
ALTER TABLE ONLY shoal.clock_state
    ADD CONSTRAINT clock_state_pkey PRIMARY KEY (id);
ALTER TABLE ONLY shoal.cookie_version
    ADD CONSTRAINT cookie_version_pkey PRIMARY KEY (run);
ALTER TABLE ONLY shoal.document
    ADD CONSTRAINT document_pkey PRIMARY KEY (key);
ALTER TABLE ONLY shoal.event
    ADD CONSTRAINT event_pkey PRIMARY KEY (id);
ALTER TABLE ONLY shoal.functions
    ADD CONSTRAINT functions_pkey PRIMARY KEY (name);
ALTER TABLE ONLY shoal.heard
    ADD CONSTRAINT heard_pkey PRIMARY KEY (session);
ALTER TABLE ONLY shoal.held
    ADD CONSTRAINT held_pkey PRIMARY KEY (token);
ALTER TABLE ONLY shoal.holder
    ADD CONSTRAINT holder_pkey PRIMARY KEY (run, name);
ALTER TABLE ONLY shoal.holder
    ADD CONSTRAINT holder_run_number_key UNIQUE (run, number);
ALTER TABLE ONLY shoal.host
    ADD CONSTRAINT host_name_key UNIQUE (name);
ALTER TABLE ONLY shoal.host
    ADD CONSTRAINT host_pkey PRIMARY KEY (id);
ALTER TABLE ONLY shoal.inventory
    ADD CONSTRAINT inventory_pkey PRIMARY KEY (run, kind, name);
ALTER TABLE ONLY shoal.item
    ADD CONSTRAINT item_pkey PRIMARY KEY (run, seq);
ALTER TABLE ONLY shoal.lane
    ADD CONSTRAINT lane_pkey PRIMARY KEY (id);
ALTER TABLE ONLY shoal.ledger
    ADD CONSTRAINT ledger_pkey PRIMARY KEY (run);
ALTER TABLE ONLY shoal.migration
    ADD CONSTRAINT migration_pkey PRIMARY KEY (component, number);
ALTER TABLE ONLY shoal.note
    ADD CONSTRAINT note_pkey PRIMARY KEY (key);
ALTER TABLE ONLY shoal.outcome
    ADD CONSTRAINT outcome_pkey PRIMARY KEY (id);
ALTER TABLE ONLY shoal.poll_state
    ADD CONSTRAINT poll_state_pkey PRIMARY KEY (id);
ALTER TABLE ONLY shoal.presence
    ADD CONSTRAINT presence_pkey PRIMARY KEY (run);
ALTER TABLE ONLY shoal.ready
    ADD CONSTRAINT ready_pkey PRIMARY KEY (lane, rank, id);
ALTER TABLE ONLY shoal.request
    ADD CONSTRAINT request_pkey PRIMARY KEY (id);
ALTER TABLE ONLY shoal.rewind
    ADD CONSTRAINT rewind_pkey PRIMARY KEY (id);
ALTER TABLE ONLY shoal.role
    ADD CONSTRAINT role_pkey PRIMARY KEY (run, role);
ALTER TABLE ONLY shoal.run
    ADD CONSTRAINT run_pkey PRIMARY KEY (id);
ALTER TABLE ONLY shoal.run
    ADD CONSTRAINT run_run_id_key UNIQUE (run_id);
ALTER TABLE ONLY shoal.stage
    ADD CONSTRAINT stage_pkey PRIMARY KEY (token);
ALTER TABLE ONLY shoal.turn
    ADD CONSTRAINT turn_pkey PRIMARY KEY (host, run);
ALTER TABLE ONLY shoal.worker
    ADD CONSTRAINT worker_pkey PRIMARY KEY (run, name);
CREATE INDEX chunk_run ON shoal.chunk USING btree (run);
CREATE INDEX event_request ON shoal.event USING btree (request);
CREATE INDEX held_due ON shoal.held USING btree (run, due);
CREATE INDEX held_overdue ON shoal.held USING btree (due);
CREATE INDEX lane_again ON shoal.lane USING btree (run, place, due) WHERE (place > 1);
CREATE INDEX lane_blocked ON shoal.lane USING btree (host, place, due) WHERE (place > 1);
CREATE INDEX lane_open ON shoal.lane USING btree (run, best_rank, best_id) WHERE (place = 1);
CREATE INDEX note_until ON shoal.note USING btree (until);
CREATE INDEX outcome_dead ON shoal.outcome USING btree (run, id) WHERE (state = 4);
CREATE UNIQUE INDEX request_fingerprint ON shoal.request USING btree (run, fingerprint);
CREATE INDEX rewind_run ON shoal.rewind USING btree (run, id);
CREATE INDEX stage_open ON shoal.stage USING btree (run, token) WHERE (remaining > 0);
\unrestrict bNBn980nlrAX6kUutcEYbuB5lXbCV4c77hRP8SQChRbPAq9Oij3hflF4IDUN8RQ
